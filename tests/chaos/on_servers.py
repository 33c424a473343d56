"""`configs/tiny/c3po.py` with its frozen language model and its search on servers."""

import pathlib
import runpy

from ml_collections import ConfigDict

TINY = pathlib.Path(__file__).parents[2] / "configs" / "tiny" / "c3po.py"


def get_config() -> ConfigDict:
    config = runpy.run_path(str(TINY))["get_config"]()
    config.llm = ConfigDict({"kind": "openai", "model": "m", "base_url": "", "timeout": 1.0})
    config.index = ConfigDict({"kind": "remote", "url": "", "timeout": 1.0})
    return config
