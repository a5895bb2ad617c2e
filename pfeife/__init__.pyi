"""What `import pfeife` has: `__init__.py` reads here where each name comes from."""

from pfeife import backend as backend
from pfeife.backend.checkpoints import Checkpoints as Checkpoints
from pfeife.backend.explain import Explanation as Explanation
from pfeife.backend.explain import explain as explain
from pfeife.backend.safetensors import save_safetensors as save_safetensors
from pfeife.backend.state import (
    clip_grad_norm_ as clip_grad_norm_,
)
from pfeife.backend.state import (
    full_state_dict as full_state_dict,
)
from pfeife.backend.step import compile as compile
from pfeife.data.figures import StepFigures as StepFigures
from pfeife.data.machine import Machine as Machine
from pfeife.data.machine import Mesh as Mesh
from pfeife.data.plan import Costs as Costs
from pfeife.data.plan import Plan as Plan
from pfeife.data.plan import RecomputeOption as RecomputeOption
from pfeife.data.replicas import Replicas as Replicas
from pfeife.data.schedule import Action as Action
from pfeife.data.schedule import Schedule as Schedule
from pfeife.data.timeline import Timeline as Timeline
from pfeife.frontend.capture import capture as capture
from pfeife.frontend.deferred import deferred_init as deferred_init
from pfeife.frontend.deferred import materialize as materialize
from pfeife.ir.boundary import stage_boundary as stage_boundary
from pfeife.ir.evaluate import Result as Result
from pfeife.ir.evaluate import evaluate as evaluate
from pfeife.ir.evaluate import state_of as state_of
from pfeife.ir.program import (
    Call as Call,
)
from pfeife.ir.program import (
    Kind as Kind,
)
from pfeife.ir.program import (
    Port as Port,
)
from pfeife.ir.program import (
    Program as Program,
)
from pfeife.ir.program import (
    Role as Role,
)
from pfeife.ir.verify import verify as verify
from pfeife.passes import (
    Pass as Pass,
)
from pfeife.passes import (
    accumulate_in as accumulate_in,
)
from pfeife.passes import (
    annotate as annotate,
)
from pfeife.passes import (
    compose as compose,
)
from pfeife.passes import (
    defer_batch_norm as defer_batch_norm,
)
from pfeife.passes import (
    dp_wrap as dp_wrap,
)
from pfeife.passes import (
    fuse as fuse,
)
from pfeife.passes import (
    insert_send_recv as insert_send_recv,
)
from pfeife.passes import (
    master_weights as master_weights,
)
from pfeife.passes import (
    partition as partition,
)
from pfeife.passes import (
    place as place,
)
from pfeife.passes import (
    record as record,
)
from pfeife.passes import (
    split_backward as split_backward,
)
from pfeife.runtime.distributed.loading import (
    data_sampler as data_sampler,
)
from pfeife.runtime.distributed.loading import (
    from_rank0 as from_rank0,
)
from pfeife.runtime.failure import PipelineError as PipelineError
from pfeife.sched.families.family import Family as Family
