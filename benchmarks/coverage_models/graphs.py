"""Nets over graphs, by torch_geometric: several graphs of one size a batch, or one for all."""

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.nn.models import (
    GAT,
    GCN,
    GIN,
    PNA,
    GraphSAGE,
    LightGCN,
    SchNet,
)

from coverage_models.example import Example

NODES = 6  # of every graph
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2, 4], [1, 2, 3, 4, 5, 0, 3, 5, 1]])


def joined(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The edges of so many alike graphs side by side, and the graph of every node."""
    shifts = torch.arange(rows).repeat_interleave(EDGES.shape[1]) * NODES
    return EDGES.repeat(1, rows) + shifts, torch.arange(rows).repeat_interleave(NODES)


def by_features(make: Callable[[], nn.Module], pool: bool = True) -> Callable[[], Example]:
    """A prediction a graph; a row of the batch has the features of a graph's nodes."""

    def build() -> Example:
        net = make()
        head = nn.Linear(16, 3)

        def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            edges, graph = joined(len(x))
            found = net(x.flatten(0, 1), edges)
            found = gnn.global_mean_pool(found, graph, len(x)) if pool else found
            return nn.functional.cross_entropy(head(found), labels)

        def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
            return torch.randn(rows, NODES, 8), torch.randint(3, (rows,))

        return Example(nn.ModuleList([net, head]), step, draw)

    return build


class Stack(nn.Module):
    """Convolutions with an activation between, a residual around each."""

    def __init__(self, make: Callable[[], nn.Module], **more: Any):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList([make() for _ in range(3)])
        self.more = more

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x, edges, **self.more).relu()
        return x


def by_nodes() -> Example:
    """Nodes are labelled; the graph is one for all rows, and given as an argument."""
    net = GCN(8, 16, 3, 3)

    def step(x: torch.Tensor, labels: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        found = torch.stack([net(one, edges) for one in x.unbind()])
        return nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten())

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, NODES, 8), torch.randint(3, (rows, NODES)), EDGES

    return Example(net, step, draw, in_dims=(0, 0, None))


def relational() -> Example:
    net = nn.ModuleList([gnn.RGCNConv(8, 16, 3), gnn.RGCNConv(16, 16, 3), gnn.RGCNConv(16, 3, 3)])
    kinds = torch.arange(EDGES.shape[1]) % 3

    def step(x: torch.Tensor) -> torch.Tensor:
        edges, _ = joined(len(x))
        found = x.flatten(0, 1)
        for layer in net:
            found = layer(found, edges, kinds.repeat(len(x))).tanh()
        return found.square().mean()

    return Example(net, step, lambda rows, size: (torch.randn(rows, NODES, 8),))


def pooled(make: Callable[[], nn.Module]) -> Callable[[], Example]:
    """Keeps the nodes with the highest scores: how many is known, which is not."""

    def build() -> Example:
        first, pool, last = gnn.GraphConv(8, 16), make(), gnn.GraphConv(16, 16)
        net = nn.ModuleList([first, pool, last])

        def step(x: torch.Tensor) -> torch.Tensor:
            edges, graph = joined(len(x))
            found = first(x.flatten(0, 1), edges).relu()
            found, edges, _, graph, *_ = pool(found, edges, None, graph)
            return gnn.global_mean_pool(last(found, edges), graph, len(x)).square().mean()

        return Example(net, step, lambda rows, size: (torch.randn(rows, NODES, 8),))

    return build


def atoms(make: Callable[[], nn.Module]) -> Callable[[], Example]:
    """Energies of molecules: neighbours are found by distance, inside of the step."""

    def build() -> Example:
        net = make()

        def step(kinds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            graph = torch.arange(len(kinds)).repeat_interleave(NODES)
            return net(kinds.flatten(), places.flatten(0, 1), graph).square().mean()

        def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
            return torch.randint(1, 9, (rows, NODES)), 2 * torch.randn(rows, NODES, 3)

        return Example(net, step, draw)

    return build


class Neighbours(nn.Module):
    """All pairs that are near, in torch alone: their number depends on the places."""

    def forward(
        self, places: torch.Tensor, graph: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        near = (places[:, None] - places[None]).norm(dim=-1) < 5.0
        near = near & (graph[:, None] == graph[None]) & ~torch.eye(len(places), dtype=torch.bool)
        edges = near.nonzero().T
        return edges, (places[edges[0]] - places[edges[1]]).norm(dim=-1)


def recommender() -> Example:
    """LightGCN over one graph of users and items; rows are pairs to be ranked."""
    users, items = 6, 8
    net = LightGCN(users + items, 16, 3)
    ends = torch.stack([torch.arange(24) % users, users + (torch.arange(24) * 5) % items])
    edges = torch.cat([ends, ends.flip(0)], 1)
    head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def step(pairs: torch.Tensor) -> torch.Tensor:
        found = net.get_embedding(edges)[pairs].flatten(1)
        return nn.functional.softplus(-head(found)).mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return (
            torch.stack([torch.randint(users, (rows,)), users + torch.randint(items, (rows,))], 1),
        )

    return Example(nn.ModuleList([net, head]), step, draw)


def point_net() -> Example:
    """Points: the neighbours of each by distance (k of them), without torch_cluster."""
    first = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16))
    second = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16))
    head = nn.Linear(16, 4)
    net = nn.ModuleList([first, second, head])

    def edge(x: torch.Tensor, mlp: nn.Module) -> torch.Tensor:
        near = torch.cdist(x, x).topk(3, largest=False).indices
        other = x.gather(1, near.flatten(1)[..., None].expand(-1, -1, x.shape[-1]))
        other = other.unflatten(1, (x.shape[1], 3))
        own = x[:, :, None].expand_as(other)
        return mlp(torch.cat([own, other - own], -1)).amax(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        return head(edge(edge(x, first), second).amax(1)).square().mean()

    return Example(net, step, lambda rows, size: (torch.randn(rows, size, 3),), (8, 10))


DEGREES = torch.tensor([0, 6, 3])
MODELS = {
    "gcn": by_features(lambda: GCN(8, 16, 3)),
    "gat": by_features(lambda: GAT(8, 16, 3, heads=2)),
    "gatv2": by_features(lambda: GAT(8, 16, 3, v2=True)),
    "gin": by_features(lambda: GIN(8, 16, 3, norm="batch_norm")),
    "graph_sage": by_features(lambda: GraphSAGE(8, 16, 3, norm="layer_norm")),
    "pna": by_features(lambda: PNA(8, 16, 3, aggregators=["mean", "max", "std"],
                                   scalers=["identity", "amplification"], deg=DEGREES)),
    "graph_transformer": by_features(lambda: Stack(lambda: gnn.TransformerConv(16, 8, 2))),
    "gen": by_features(lambda: Stack(lambda: gnn.GENConv(16, 16))),
    "cheb": by_features(lambda: Stack(lambda: gnn.ChebConv(16, 16, 2))),
    "arma": by_features(lambda: Stack(lambda: gnn.ARMAConv(16, 16))),
    "appnp": by_features(lambda: Stack(lambda: gnn.APPNP(3, 0.1))),
    "edge_conv": by_features(lambda: Stack(lambda: gnn.EdgeConv(nn.Linear(32, 16)))),
    "gated": by_features(lambda: Stack(lambda: gnn.GatedGraphConv(16, 2))),
    "gps": by_features(lambda: Stack(lambda: gnn.GPSConv(16, gnn.GraphConv(16, 16), heads=2))),
    "nodes": by_nodes,
    "rgcn": relational,
    "top_k_pooling": pooled(lambda: gnn.TopKPooling(16, 0.5)),
    "sag_pooling": pooled(lambda: gnn.SAGPooling(16, 0.5)),
    "schnet": atoms(lambda: SchNet(16, 16, 2, 8, 5.0, interaction_graph=Neighbours())),
    "light_gcn": recommender,
    "edge_points": point_net,
}  # fmt: skip
