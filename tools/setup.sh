#!/bin/sh
# Make a virtual environment and install this project into it: tools/setup.sh FOLDER EXTRA
# Uses python3 with venv, or uv, or virtualenv: whichever is there. Safe to run again.
set -eu
venv=$1
extra=$2
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*"; }
stop() { printf '\n%s\n' "$*" >&2; exit 1; }

install_line() {
    if command -v apt-get >/dev/null 2>&1; then say "    sudo apt-get install python3 python3-venv"
    elif command -v dnf >/dev/null 2>&1; then say "    sudo dnf install python3"
    elif command -v pacman >/dev/null 2>&1; then say "    sudo pacman -S python"
    elif command -v apk >/dev/null 2>&1; then say "    sudo apk add python3"
    elif command -v brew >/dev/null 2>&1; then say "    brew install python"
    else say "    (your system's package of Python 3.11 or newer, with its venv module)"; fi
}

# The newest Python that is new enough: python3 first, for it is what the person expects.
python=
too_old=
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
    too_old=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
done

if [ ! -x "$venv/bin/python" ]; then
    if [ -n "$python" ] && "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        "$python" -m venv "$venv"
    elif command -v uv >/dev/null 2>&1; then
        uv venv --quiet --seed --python '>=3.11' "$venv"
    elif [ -n "$python" ] && command -v virtualenv >/dev/null 2>&1; then
        virtualenv --quiet --python "$python" "$venv"
    elif [ -n "$python" ] && "$python" -m virtualenv --version >/dev/null 2>&1; then
        "$python" -m virtualenv --quiet "$venv"
    elif [ -z "$python" ] && [ -n "$too_old" ]; then
        stop "Python $too_old is too old: tinyvllm needs 3.11 or newer. Install it, or uv (which brings its own):
$(install_line)
    or: curl -LsSf https://astral.sh/uv/install.sh | sh"
    else
        stop "tinyvllm needs Python 3.11 or newer with venv, or uv, or virtualenv; none was found. Install one:
$(install_line)"
    fi
fi

extras=$extra
if command -v nvidia-smi >/dev/null 2>&1 || [ -e /proc/driver/nvidia/version ]; then
    extras="$extras,gpu"
else
    say "No NVIDIA driver here: CuPy is not installed, kernels will run in the CPU emulation."
fi

say "Installing tinyvllm [$extras] into $venv (a few minutes the first time) ..."
if [ -x "$venv/bin/pip" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extras]" \
        || stop "The installation failed. Without a network? It needs one the first time. Then run the same command again."
else
    uv pip install --quiet --python "$venv/bin/python" -e ".[$extras]" \
        || stop "The installation failed. Without a network? It needs one the first time. Then run the same command again."
fi

# What includes other extras has installed them too: make then has nothing more to do for them.
touch "$venv/.installed-$extra"
case $extra in
    dev) touch "$venv/.installed-course" "$venv/.installed-grade" "$venv/.installed-notebook" ;;
    grade | notebook) touch "$venv/.installed-course" ;;
esac
