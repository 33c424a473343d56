"""Sphinx configuration of the documentation site.

python -m sphinx -W -b html docs docs/_build
"""

from __future__ import annotations

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from jax_ragrl import __version__  # noqa: E402

project = "jax_ragrl"
author = "the jax_ragrl authors"
copyright = "the jax_ragrl authors, Apache-2.0"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "drawing",
    "generated",
    "llms",
    "mathml",
]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
smartquotes = False  # `--option` would become a dash
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

# Docstrings write code in single backticks.
default_role = "code"
add_module_names = False
highlight_language = "text"  # of an indented block in a docstring
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 80
napoleon_custom_sections = [("Fields", "Attributes")]
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # a name that several modules define: no link is better than one

html_theme = "furo"
html_title = "jax_ragrl"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False  # llms.py writes the sources, with what is generated in them
html_show_sphinx = False
html_theme_options = {
    "source_repository": "https://github.com/jax-ragrl/jax_ragrl/",
    "source_branch": "main",
    "source_directory": "docs/",
}
html_baseurl = "https://jax-ragrl.github.io/jax_ragrl/"
# Prompts and terminal output are not copied with a command.
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
