"""A transport of one's own: a rank a process, and queues of multiprocessing between them.

Run `python examples/own_transport.py`: it trains a GPT on two ranks by 1F1B, and compares every
loss and gradient with one device. All processes run the same loop on the same model and batches; a
rank computes its stages alone, and then gives its part of the result to the others.
"""

import io
from functools import partial
from itertools import permutations

import attrs
import torch
import torch.multiprocessing
from gpt import GPT

import pfeife
from pfeife import runtime

RANKS, MICROBATCHES, STEPS = 2, 4, 3


class Queues:
    """The transport of a rank: `queues` has one from each rank to each other one. What is sent is
    copied at once, so nothing has to be kept until it has arrived."""

    device = None  # all values are on the CPU

    def __init__(self, rank, queues):
        self.rank, self.queues = rank, queues

    def expect(self, source, channel):
        """Messages bring their own memory."""

    def send(self, destination, values, envelope):
        envelope.check(values)
        self.put(destination, values)

    def receive(self, source):
        return torch.load(io.BytesIO(self.queues[source, self.rank].get()), weights_only=True)

    def release(self, destination, count):
        """Nothing was kept."""

    def reduce(self, bucket, parts):
        raise NotImplementedError  # `OneRank` refuses programs that reduce

    def put(self, destination, value):
        """As bytes: a tensor in a queue would share the memory of this process."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self.queues[self.rank, destination].put(buffer.getvalue())

    def gather(self, mine):
        """What each rank gives."""
        for other in set(range(RANKS)) - {self.rank}:
            self.put(other, mine)
        return [mine if rank == self.rank else self.receive(rank) for rank in range(RANKS)]


class OneRank:
    """The runtime: runs one rank, and has the results of all. It is its own step."""

    def __init__(self, program, schedule, bodies, *, rank, queues):
        if program.reductions:
            raise ValueError("stages of several ranks share a weight, and Queues cannot reduce")
        self.transport = Queues(rank, queues)
        if len(set(self.transport.gather(f"{program}\n{schedule.to_csv()}"))) > 1:
            raise ValueError("the processes have different programs or schedules")
        self.runner = runtime.RankRunner(program, schedule, rank, bodies)
        self.gradients = frozenset(port.fqn for port in program.ports(pfeife.Role.GRADIENT))

    def start(self, state, microbatches, **options):
        (part,) = runtime.parts_of(self.runner.program, microbatches, **options)
        self.step = self.runner.start(state, part, self.transport)
        return self

    def run(self, *, forward=True, backward=True, watch=None):
        if not (forward and backward):
            raise ValueError("the loss has to be inside of the step")
        self.runner.run(self.step, observe=watch and watch(self.runner.rank))

    def result(self, *, outputs=True):
        mine = attrs.asdict(self.runner.result(self.step), recurse=False)
        results = [pfeife.Result(**one) for one in self.transport.gather(mine)]
        return runtime.joined(self.runner.program, results, self.step.sizes)


def on_one_device(model, batch):
    """The loss, and the gradients, added up in the order of the microbatches."""
    parts = zip(*(one.chunk(MICROBATCHES) for one in batch), strict=True)
    losses = [model.loss(*part) / MICROBATCHES for part in parts]
    for loss in losses:
        loss.backward()
    found = [sum(losses), *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return found


def train(rank, queues):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(context=16, width=32, depth=2)
    optimizer = torch.optim.AdamW(model.parameters())
    own = partial(OneRank, rank=rank, queues=queues)
    step = pfeife.compile(model.loss, microbatches=MICROBATCHES, stages=RANKS, runtime=own)
    for batch in torch.randint(256, (STEPS, 2, 16, 16)):
        expected = on_one_device(model, batch)
        loss = step(*batch)
        loss.backward()
        found = [loss, *(parameter.grad for parameter in model.parameters())]
        if not all(map(torch.equal, found, expected)):
            raise ArithmeticError("another loss or gradient than on one device")
        optimizer.step()
        optimizer.zero_grad()
    actions = step.backend.compiled[0].schedule.ranks[rank]
    print(f"rank {rank}: {' '.join(map(str, actions[:9]))} ...")


def process(rank, queues):
    try:
        train(rank, queues)
    except BaseException:
        for queue in queues.values():
            queue.cancel_join_thread()  # else this process waits for its messages to be read
        raise


def main() -> None:
    queue = torch.multiprocessing.get_context("spawn").Queue
    queues = {pair: queue() for pair in permutations(range(RANKS), 2)}
    torch.multiprocessing.spawn(process, (queues,), RANKS)  # if one fails, ends all and says why
    print(f"{STEPS} of {STEPS} losses are the same, with all gradients, bit for bit")


if __name__ == "__main__":
    main()
