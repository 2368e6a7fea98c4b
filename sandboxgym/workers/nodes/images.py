"""Images on the nodes of a fleet: which node has which parts, one fetch of each from the registry, ahead of demand."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandboxgym.workers.env_host import FleetError

if TYPE_CHECKING:
    from sandboxgym.sandbox.images.pull import Origin
    from sandboxgym.sandbox.images.registry import Image

try:
    import ray
    from ray.experimental import internal_kv
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

logger = logging.getLogger("sandboxgym")

_NAMESPACE = "sandboxgym-images"
_CLAIM = 120.0
"""Seconds after which the claim of a node that fetches a part ends, unless the part is there."""


class RayBoard:
    """The `Board` of a node, in the key-value table of the cluster's head.

    Args:
        node: id of this node.
        peers: actors of the other nodes, by id.
    """

    def __init__(self, node: str, peers: Mapping[str, Any]) -> None:
        self._node, self._peers = node, peers

    def holders(self, digest: str) -> Sequence[str]:
        """Nodes that have a part and can be asked for it."""
        keys = internal_kv._internal_kv_list(f"has/{digest}/", namespace=_NAMESPACE)
        return [node for key in keys if (node := key.decode().rpartition("/")[2]) in self._peers]

    def claim(self, digest: str) -> bool:
        """Claim a part; see `Board.claim`."""
        key, mine = f"claim/{digest}", str(time.time()).encode()
        if not internal_kv._internal_kv_put(key, mine, overwrite=False, namespace=_NAMESPACE):
            return True
        row = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
        if row is not None and time.time() - float(row) > _CLAIM:
            self.release(digest)
        return False

    def release(self, digest: str) -> None:
        """End a claim."""
        internal_kv._internal_kv_del(f"claim/{digest}", namespace=_NAMESPACE)

    def announce(self, digest: str) -> None:
        """Say that this node has a part."""
        internal_kv._internal_kv_put(f"has/{digest}/{self._node}", b"1", namespace=_NAMESPACE)

    def read(self, node: str, digest: str, start: int, nbytes: int) -> bytes | None:
        """Read from another node; see `Board.read`."""
        try:
            found: bytes | None = ray.get(self._peers[node].read.remote(digest, start, nbytes), timeout=60.0)
        except ray.exceptions.RayError as error:
            logger.warning("node %s cannot be asked for an image: %s", node[:8], type(error).__name__)
            found = None
        if found is None:
            internal_kv._internal_kv_del(f"has/{digest}/{node}", namespace=_NAMESPACE)
        return found


class _NodeImages:
    """The process on a node that brings images there and answers other nodes."""

    def __init__(self, folder: str | None, max_bytes: int | None) -> None:
        from sandboxgym import data
        from sandboxgym.sandbox.images.cache import LayerCache

        self.node = str(ray.get_runtime_context().get_node_id())
        place = Path(folder) / self.node[:8] if folder else data.cache_dir() / "image-layers"
        self.cache = LayerCache(place, max_bytes=max_bytes)

    def bring(self, image: Image, peers: Mapping[str, Any], load: bool) -> dict[str, Origin]:
        from sandboxgym.sandbox.images import pull

        origins = pull.pull(image, self.cache, RayBoard(self.node, peers))
        if load:
            pull.load(image, self.cache)
        return origins

    def read(self, digest: str, start: int, nbytes: int) -> bytes | None:
        return self.cache.read(digest, start, nbytes)

    def digests(self) -> list[str]:
        return sorted(self.cache.digests())


class FleetImages:
    """Images on all nodes of the cluster that this process is connected to.

    A part is looked for on the node, on other nodes, then at the registry, from which each is fetched once.

    Args:
        folder: of the parts on each node, a folder below it per node; default: ``image-layers`` in the cache there.
        max_bytes: quota of each node, by which the parts used longest ago are deleted; None: none.
        load: hand images to the Docker daemon of each node, for ``docker:NAME`` as a root file system.
        resources: custom resources of the nodes that get images.
    """

    def __init__(
        self,
        folder: str | None = None,
        *,
        max_bytes: int | None = None,
        load: bool = True,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from sandboxgym.workers.nodes.placement import eligible

        self._load = load
        self._nodes: dict[str, Any] = {}
        actor = ray.remote(_NodeImages)
        for node in eligible(ray.nodes(), {"CPU": 0.01, **(resources or {})}, ()):  # type: ignore[no-untyped-call]
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            # While it brings one image it answers other nodes.
            options = {"num_cpus": 0.01, "max_concurrency": 8, "scheduling_strategy": strategy}
            self._nodes[node] = actor.options(**options).remote(folder, max_bytes)

    def prefetch(self, images: Iterable[str], *, nodes: Iterable[str] | None = None) -> dict[str, dict[str, Origin]]:
        """Bring images to nodes, all nodes side by side, before an environment needs them.

        Args:
            images: names, such as those of a list of tasks; each is brought once.
            nodes: ids; default: all.

        Returns:
            Where each part came from, by node and digest.

        Raises:
            ImageError: an image cannot be had.
            FleetError: a node was lost meanwhile.
        """
        from sandboxgym.sandbox.images.registry import Registry

        found = [Registry(name).image() for name in dict.fromkeys(images)]
        chosen = list(self._nodes) if nodes is None else list(nodes)
        origins: dict[str, dict[str, Origin]] = {node: {} for node in chosen}
        for image in found:
            calls = {}
            for node in chosen:
                peers = {other: actor for other, actor in self._nodes.items() if other != node}
                calls[node] = self._nodes[node].bring.remote(image, peers, self._load)
            for node, call in calls.items():
                try:
                    origins[node].update(ray.get(call))
                except ray.exceptions.RayTaskError as error:
                    raise error.as_instanceof_cause() from None  # type: ignore[no-untyped-call]
                except ray.exceptions.RayError as error:
                    raise FleetError(f"node {node[:8]} was lost while it got {image.name}: {error}") from error
        return origins

    def holders(self, images: Iterable[str]) -> dict[str, int]:
        """Bytes of the images that each node has, by its id: where environments of them start soonest."""
        from sandboxgym.sandbox.images.registry import Registry

        sizes = {blob.digest: blob.nbytes for name in images for blob in Registry(name).image().blobs}
        return {
            node: sum(sizes.get(digest, 0) for digest in ray.get(actor.digests.remote()))
            for node, actor in self._nodes.items()
        }

    def close(self) -> None:
        """End the processes on the nodes; what they fetched stays there. Idempotent."""
        for actor in self._nodes.values():
            ray.kill(actor)
        for node in self._nodes:
            for key in internal_kv._internal_kv_list("has/", namespace=_NAMESPACE):
                if key.decode().endswith(f"/{node}"):
                    internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
        self._nodes = {}


def images_of(tasks: Iterable[Any]) -> list[str]:
    """Names of the images that tasks need, each once: ``image`` of rows of data sets, or of objects."""
    names = [task.get("image") if isinstance(task, Mapping) else getattr(task, "image", None) for task in tasks]
    return list(dict.fromkeys(str(name) for name in names if name))
