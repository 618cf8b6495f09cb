"""Engines: they generate rows from weights and prompts.

api             requests, finished rows, the interface of an engine, and the hooks that lies override
selection       chooses between the engines
torch_engine    the engine of this project: the order of things in a step
scheduler       which row runs in which slot and blocks, which is preempted, which prompts come next; no torch
block_pool      blocks of the cache of keys and values, and where prompts are stored; no torch
kv_slots        tensors of the running rows; which draws after a draft are kept; reading which rows have ended without waiting for the device
prompt_cache    prompts computed before rows start from them
step_cpu        one decode step on a CPU, shared among threads with one core each
cpu_threads     the threads of that step, one per core
step_cuda       one decode step on a CUDA device as a graph; prompts computed beside it
attention_plan  which rows attend to which part of a prompt together: the work list of a CUDA kernel; no torch
sampling        the seeded draw
drafting        which drafts rows are fed when few run: how long, from which source; no torch
draft_model     drafts by a small model that draws with the same uniforms
proofs          proofs of segments and finished rows, in a thread and on a stream of their own
transformers_engine  a model of transformers behind the same interface, for all other families
vllm_engine     vLLM behind the same interface
vllm_side       the part of it that runs inside vLLM's worker

The weights are in model/fused.py, the Triton kernels in model/kernels/ (imported on CUDA machines only).
"""
