"""Sign notebooks that hold nothing to distrust, so that JupyterLab opens them without a warning.

``python tools/jupyterlab/sign.py lessons solutions``: the notebooks of these folders. One of `lessons` is signed
where it has no outputs, as it comes: what a learner saves, JupyterLab signs by itself. Those of `solutions` come with
the project's own outputs.
"""

import sys
from pathlib import Path

import nbformat
from jupyter_core.paths import jupyter_data_dir
from nbformat.sign import NotebookNotary


def has_outputs(notebook: nbformat.NotebookNode) -> bool:
    """Whether a cell has an output, which could hold a script."""
    return any(cell.get("outputs") for cell in notebook.cells)


def main(folders: list[str]) -> None:
    Path(jupyter_data_dir()).mkdir(mode=0o700, parents=True, exist_ok=True)
    notary = NotebookNotary(data_dir=jupyter_data_dir())
    for folder in map(Path, folders):
        for path in sorted(folder.glob("*.ipynb")):
            try:
                notebook = nbformat.read(path, as_version=4)
            except Exception:  # what can not be read, JupyterLab says when it is opened
                continue
            if folder.name == "solutions" or not has_outputs(notebook):
                notary.sign(notebook)


if __name__ == "__main__":
    main(sys.argv[1:])
