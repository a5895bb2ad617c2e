"""The rows of benchmarks/gpu.py: what runs on a GPU, and whether it is right and fast there.

Read `rows` first (what a row is and says), then `correctness` (passes, schedules) and `training`
(whole loops), whose models are in `cases` and whose numbers `beside_eager` compares; `nccl` starts
the ranks of `ranks`; `measuring` holds costs, memory and predictions against the device; `timing`,
`compiled` and `peers` are about speed. `workers` runs rows in processes of their own, and
`surroundings` says what there is, or what is missing.
"""
