"""Images on the nodes of a fleet: which node has which parts, one fetch of each from the registry, ahead of demand."""

from __future__ import annotations

import contextlib
import logging
import os
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
"""Seconds after which the claim of a node that fetches a part ends, unless it is renewed or the part is there."""


class RayBoard:
    """The `Board` of a node, in the key-value table of the cluster's head.

    Args:
        node: id of this node.
        peers: actors of the other nodes, by id.
    """

    def __init__(self, node: str, peers: Mapping[str, Any]) -> None:
        self._node, self._peers = node, peers
        self._name = os.urandom(8).hex().encode()
        self._renewed = 0.0
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Claims of others, and since when they are as they are, by this node's clock."""

    def holders(self, digest: str) -> Sequence[str]:
        """Nodes that have a part and can be asked for it."""
        keys = internal_kv._internal_kv_list(f"has/{digest}/", namespace=_NAMESPACE)
        return [node for key in keys if (node := key.decode().rpartition("/")[2]) in self._peers]

    def claim(self, digest: str) -> bool:
        """Claim a part; see `Board.claim`."""
        key, now = f"claim/{digest}", time.monotonic()
        if not internal_kv._internal_kv_put(key, self._name, overwrite=False, namespace=_NAMESPACE):
            self._renewed = now
            return True
        row = internal_kv._internal_kv_get(key, namespace=_NAMESPACE) or b""
        since = self._seen.get(digest, (b"", 0.0))
        if row != since[0]:
            self._seen[digest] = row, now
        elif row and now - since[1] > _CLAIM:
            internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
        return False

    def keep(self, digest: str) -> None:
        """Renew a claim; see `Board.keep`."""
        if time.monotonic() - self._renewed > _CLAIM / 8:
            self._renewed = time.monotonic()
            internal_kv._internal_kv_put(
                f"claim/{digest}", self._name + os.urandom(4).hex().encode(), namespace=_NAMESPACE
            )

    def release(self, digest: str) -> None:
        """End a claim; see `Board.release`."""
        row = internal_kv._internal_kv_get(f"claim/{digest}", namespace=_NAMESPACE)
        if row is not None and row.startswith(self._name):
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

    def bring(self, image: Image, peers: Mapping[str, Any], load: bool, timeout: float) -> dict[str, Origin]:
        from sandboxgym.sandbox.images import pull

        with self.cache.holding([blob.digest for blob in image.blobs]):
            origins = pull.pull(image, self.cache, RayBoard(self.node, peers), timeout=timeout)
            if load:
                pull.load(image, self.cache)
            self.cache.note(image)
        return origins

    def read(self, digest: str, start: int, nbytes: int) -> bytes | None:
        return self.cache.read(digest, start, nbytes)

    def nbytes_of(self, names: Sequence[str]) -> int:
        return self.cache.nbytes_of(names)


class FleetImages:
    """Images on all nodes of the cluster that this process is connected to.

    A part is looked for on the node, on other nodes, then at the registry, from which each is fetched once.

    Args:
        folder: of the parts on each node, a folder below it per node; default: ``image-layers`` in the cache there.
        max_bytes: quota of each node, by which the parts used longest ago are deleted; None: none.
        load: hand images to the Docker daemon of each node, for ``docker:NAME`` as a root file system.
        timeout: seconds that nodes have to bring one image.
        resources: custom resources of the nodes that get images.
    """

    def __init__(
        self,
        folder: str | None = None,
        *,
        max_bytes: int | None = None,
        load: bool = True,
        timeout: float = 3600.0,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from sandboxgym.workers.nodes.placement import eligible

        self._load, self._timeout = load, timeout
        self._found: dict[str, Image] = {}
        self._brought = False
        self._nodes: dict[str, Any] = {}
        actor = ray.remote(_NodeImages)
        for node in eligible(ray.nodes(), {"CPU": 0.01, **(resources or {})}, ()):  # type: ignore[no-untyped-call]
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            # While it brings one image it answers other nodes. It waits for no room on one that is full of workers.
            options = {"num_cpus": 0, "max_concurrency": 8, "scheduling_strategy": strategy}
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
            FleetError: a node was lost meanwhile, or did not get an image in time.
            ValueError: there is no such node.
        """
        found = [self._image(name) for name in dict.fromkeys(images)]
        self._brought = True
        chosen = list(self._nodes) if nodes is None else list(nodes)
        if unknown := sorted(set(chosen) - set(self._nodes)):
            raise ValueError(f"expected ids of nodes among {sorted(self._nodes)}, found {unknown}")
        origins: dict[str, dict[str, Origin]] = {node: {} for node in chosen}
        for image in found:
            calls = {}
            deadline = time.monotonic() + self._timeout
            for node in chosen:
                peers = {other: actor for other, actor in self._nodes.items() if other != node}
                calls[node] = self._nodes[node].bring.remote(image, peers, self._load, self._timeout)
            for node, call in calls.items():
                try:
                    brought = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
                    origins[node] = {**brought, **origins[node]}  # a part of several images came with the first
                except ray.exceptions.GetTimeoutError as error:
                    raise FleetError(f"node {node[:8]} did not get {image.name} within {self._timeout:g} s") from error
                except ray.exceptions.RayTaskError as error:
                    raise error.as_instanceof_cause() from None  # type: ignore[no-untyped-call]
                except ray.exceptions.RayError as error:
                    raise FleetError(f"node {node[:8]} was lost while it got {image.name}: {error}") from error
        return origins

    def holders(self, images: Iterable[str]) -> dict[str, int]:
        """Bytes that each node has, by its id, of images that `prefetch` brought: environments start soonest there.

        No registry is asked. A node that does not answer within a minute has none.
        """
        names = list(dict.fromkeys(images))
        calls = {actor.nbytes_of.remote(names): node for node, actor in self._nodes.items()}
        weights = dict.fromkeys(self._nodes, 0)
        for call in ray.wait(list(calls), num_returns=len(calls), timeout=60.0)[0] if calls else ():
            with contextlib.suppress(ray.exceptions.RayError):
                weights[calls[call]] = ray.get(call)
        return weights

    def _image(self, name: str) -> Image:
        """An image's parts, for which its registry is asked once."""
        from sandboxgym.sandbox.images.registry import Registry

        if name not in self._found:
            self._found[name] = Registry(name).image()
        return self._found[name]

    def close(self) -> None:
        """End the processes on the nodes; what they fetched stays there. Idempotent."""
        for actor in self._nodes.values():
            ray.kill(actor)
        for node in self._nodes if self._brought else ():  # else what is known of them is another one's
            for key in internal_kv._internal_kv_list("has/", namespace=_NAMESPACE):
                if key.decode().endswith(f"/{node}"):
                    internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
        self._nodes = {}


def images_of(tasks: Iterable[Any]) -> list[str]:
    """Names of the images that tasks need, each once: ``image`` of rows of data sets, or of objects; or names.

    Left out is what no registry has: ``"host"``, the tool chain of a machine, and ``"dir:/path"``, a directory of it.
    """
    names = [
        task
        if isinstance(task, str)
        else task.get("image")
        if isinstance(task, Mapping)
        else getattr(task, "image", None)
        for task in tasks
    ]
    return list(dict.fromkeys(str(name) for name in names if name and name != "host" and not name.startswith("dir:")))
