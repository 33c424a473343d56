"""Tests of what uses a running server; `.ci/integrations` starts the servers and runs these.

  RAGRL_URL       `ragrl serve --mcp` with the tiny policy, on the generated encyclopedia
  RAGRL_MIXTURE   `ragrl serve retriever --mcp` of the mixture's corpus

Without the addresses no test is collected, so that an environment without the packages has none
to skip; with them, a missing package is an error.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if "RAGRL_URL" in os.environ else ["test_*.py"]
