"""The first code cell of each lesson: it installs what is missing where the notebook runs somewhere else.

Where the course can be imported it does nothing. A hosted notebook has often no more than the folder that was cloned
or uploaded; ``tools/hosted.py`` in it does the rest. A notebook does not know the repository's address: none is named.
"""

from __future__ import annotations

ID = "tinyvllm-set-up"
SOURCE = """\
# @title Set-up: nothing to do here. In a hosted notebook, running this cell installs what is missing.
try:
    import tinyvllm_ref.device
except ImportError:
    import pathlib, runpy

    here = pathlib.Path.cwd()
    near = [here, *here.parents, *(folder for folder in sorted(here.iterdir()) if folder.is_dir())]
    found = [folder / "tools" / "hosted.py" for folder in near if (folder / "tools" / "hosted.py").is_file()]
    if not found:
        raise ImportError(
            f"this notebook is alone: the rest of the course is neither in {here} nor around it. Clone the repository "
            "that it comes from (!git clone ADDRESS in a cell), or upload the whole folder and unpack it here; then "
            "run this cell again. On a computer of your own, open the notebook with `make lab`."
        ) from None
    runpy.run_path(str(found[0]), run_name="__main__")"""

# Folded in JupyterLab and in Colab; what it prints is not compared.
METADATA = {"jupyter": {"source_hidden": True}, "cellView": "form", "tags": ["nbval-ignore-output"]}
