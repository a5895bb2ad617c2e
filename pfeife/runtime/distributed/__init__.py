"""A rank a process, over torch.distributed.

`pipeline` runs a rank's schedule over `transport`; read these first, then `peers` (how the
processes agree and wait for one another; `agreement` is a part of it), `world` (what they share),
`process_group`, `interface`, `rendezvous` and `starting` (how they find one another). `ownership`,
`owned` and `foreign` keep state where it is trained, `gradients` and `elsewhere` do so with
gradients, `apart` tries whether an optimizer takes parameters one by one; `telling` is what ranks
tell one another of all this before a step, `copies` are of what one replica trains for all,
`derived` is what scripts compute of state, `deep_copies` what they copy, `step_hooks` call all that
has to do with an optimizer's step. `saving` and `optimizers` give state whole to whoever saves it:
`asking` knows who has what, `serving` asks, `answering` answers where the `script` rests, by
`questions` that `posting` carries; `writes` counts what scripts write by hand, `collectives` says
in which of its own a script is. `shares` are what a rank writes to a checkpoint, by `writing`.
`staying`, `heartbeat`, `lifelines`, `patience`, `diagnosis`, `ending` and `last_words` are for when
a rank is late or gone; `ends` is how a message goes, within a node through memory that is `mapped`;
`connection`, `connecting`, `sending`, `reducing`, `buffers` and `arriving` are parts of the
transport as well, `launching` says how CUDA must launch kernels for it, `meshes` reads which ranks
are its pipelines. `loading` gives ranks their data: `announcing` tells all what rank 0 has,
`rank_zero` does so with a call's arguments. `batch_norms` joins what those of replicas have found.
Tensors that travel together are a message by `packing`. `wrapped` refuses models that DDP or FSDP
distributes.
"""

from pfeife.runtime.distributed.pipeline import DistributedPipeline, DistributedStep

__all__ = ["DistributedPipeline", "DistributedStep"]
