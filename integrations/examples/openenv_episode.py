"""OpenEnv: an episode of the environment in `ragrl_envs`, here of a person who searches once."""

import os
import sys

from openenv.core import GenericEnvClient

URL = os.environ.get("RAGRL_URL", "http://localhost:9000")

query, answer = sys.argv[1:]
with GenericEnvClient(base_url=URL).sync() as env:
    print(env.reset(split="dev", index=0).observation["text"])
    print(env.step({"search": query}).observation["text"])
    print(env.step({"answer": answer}).reward)
