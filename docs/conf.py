# SPDX-License-Identifier: Apache-2.0
"""Configuration of the documentation's site (make docs).

The site's root is the repository's, so that one link is right in both. Linked files
that are no page become downloads. A link that leads nowhere fails the build.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
# The package by the name under which it is installed, for the API's page.
_package = ROOT / "vllm" / "v1" / "nwor"
_spec = spec_from_file_location("vllm_nwor", _package / "__init__.py")
sys.modules["vllm_nwor"] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["vllm_nwor"])

root_doc = "README"
NAVIGATION = {
    "Use it": "docs/quickstart docs/operations docs/variables docs/kubernetes "
    "tools/monitoring/README docs/troubleshooting docs/security",
    "The KV audit": "docs/audit docs/connectors docs/rl",
    "Reference": "docs/api NWOR_IMPLEMENTATION_SUMMARY docs/reach docs/versions "
    "results/README docs/CHANGELOG",
    "Develop": "CONTRIBUTING tests/README docs/for_vllm tools/gpu/README",
}

pages = " ".join(NAVIGATION.values()).split()
project = html_title = "vllm-nwor"
version = sys.modules["vllm_nwor"].__version__
extensions = ["myst_parser", "sphinx_copybutton"]
extensions += ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = [f"{one}.md" for one in [root_doc, *pages]]
exclude_patterns = [".*", "build", "dist"]
html_theme = "furo"
html_show_copyright = False
myst_heading_anchors = 4
autodoc_mock_imports = ["torch"]
autodoc_typehints = "signature"
napoleon_use_ivar = True
highlight_language = "text"
default_role = "code"


def add_navigation(_app: Sphinx, name: str, text: list[str]) -> None:
    """Appends what the sidebar shows to the first page, which hides it."""
    for caption, names in NAVIGATION.items() if name == root_doc else ():
        lines = ["", "```{toctree}", ":hidden:", f":caption: {caption}", ""]
        text[0] += "\n".join([*lines, *names.split(), "```", ""])


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
