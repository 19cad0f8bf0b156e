"""What differs between the programs that show notebooks: VS Code, and JupyterLab with Notebook 7."""

from __future__ import annotations

import base64
import html
import re
import urllib.parse

# What VS Code's Markdown renderer takes out of a heading when it makes an id of it
# (microsoft/vscode, extensions/markdown-language-features/notebook/index.ts).
_NOT_IN_IDS = re.compile(
    r"[\]\[!/'\"#$%&()*+,.:;<=>?@\\^{|}~`。，、；：？！…—·ˉ¨‘’“”々～‖∶＂＇｀｜〃〔〕〈〉《》「」『』．〖〗【】（）［］｛｝]"
)
_LEFT_BY_ENCODE_URI = ";,/?:@&=+$-_.!~*'()#"


def in_vscode() -> bool:
    """Whether VS Code's Jupyter extension started this kernel: it defines ``__vsc_ipynb_file__`` in each Python one."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and "__vsc_ipynb_file__" in shell.user_ns


def link_to_cell(cell: str, heading: str) -> str:
    """The address, within its notebook, of the cell with this id and this Markdown heading.

    VS Code goes to headings alone, JupyterLab and Notebook 7 from an output to cells alone.
    """
    return f"#{_vscode_id(heading)}" if in_vscode() else f"#cell-id={cell}"


def _vscode_id(heading: str) -> str:
    words = re.sub(r"\s+", "-", heading.strip().lower())
    return urllib.parse.quote(_NOT_IN_IDS.sub("", words).strip("-"), safe=_LEFT_BY_ENCODE_URI)


def sized_picture(png: bytes, alt: str, width: int) -> str:
    """A PNG as an ``<img>``, for VS Code, which does not read the width from an output's metadata.

    Parameters
    ----------
    png : bytes
    alt : str
    width : int
        CSS pixels; less where the cell is narrower.
    """
    source = base64.b64encode(png).decode("ascii")
    return (
        f'<img alt="{html.escape(alt)}" width="{width}" style="max-width: 100%; height: auto" '
        f'src="data:image/png;base64,{source}">'
    )
