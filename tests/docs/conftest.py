"""The generators of the documentation are modules of docs/_ext."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "docs" / "_ext"))
