"""Supervised training before reinforcement learning, and the generation of its data.

Three supervised runs resume (`unfinished.py`):
`warmup.warm_up`: a tiny decoder from scratch, on data of a scripted teacher (`sft_step`, Muon);
`finetune.fine_tune`: a baseline's generator, on answers to questions (`imitate`, AdamW);
`demos.warm_start`: a policy, on a file of demonstrations (`imitate`, AdamW).
"""
