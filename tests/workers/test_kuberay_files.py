"""The objects of docs/examples/fleet for KubeRay: what they say to Kubernetes, to Ray and to this package."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from components import missing

from sandboxgym import data
from sandboxgym.system import run_directories

FILES = Path(__file__).parents[2] / "docs" / "examples" / "fleet"


def documents(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a file, by kind."""
    found = list(yaml.safe_load_all((FILES / name).read_text(encoding="utf-8")))
    return {document["kind"]: document for document in found}


def clusters() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The specification of each cluster, with that of the object that it is in."""
    spec = documents("raycluster.yaml")["RayCluster"]["spec"]
    yield spec, spec
    job = documents("rayjob.yaml")["RayJob"]["spec"]
    yield job["rayClusterSpec"], job


def groups() -> Iterator[tuple[str, dict[str, Any]]]:
    """Groups of nodes of each cluster, with what they are: head or worker."""
    for spec, _ in clusters():
        yield "head", spec["headGroupSpec"]
        yield from (("worker", group) for group in spec["workerGroupSpecs"])


def container_of(group: dict[str, Any]) -> dict[str, Any]:
    (container,) = group["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


GROUP = {"rayStartParams", "template"}
KNOWN = {
    "cluster": {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"},
    "job": {"entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec"},
    "head": GROUP,
    "workers": GROUP | {"groupName", "replicas", "minReplicas", "maxReplicas"},
    "pod": {"containers", "volumes", "automountServiceAccountToken"},
    "container": {"name", "image", "resources", "ports", "env", "volumeMounts", "securityContext"},
}
"""Fields that the files have, all of them in KubeRay's definitions of RayCluster and RayJob (ray.io/v1)."""


def test_the_objects_have_only_fields_that_are_defined_and_agree_with_each_other() -> None:
    for spec, outer in clusters():
        assert set(spec) <= KNOWN["cluster"] and (outer is spec or set(outer) <= KNOWN["job"])
        assert spec["authOptions"] == {"mode": "token"}
        assert set(spec["headGroupSpec"]) <= KNOWN["head"]
        assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
        images = set()
        for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
            assert all(isinstance(value, str) for value in group["rayStartParams"].values())
            pod = group["template"]["spec"]
            assert set(pod) <= KNOWN["pod"] and pod["automountServiceAccountToken"] is False
            container = container_of(group)
            assert set(container) <= KNOWN["container"]
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert {mount["name"] for mount in container.get("volumeMounts", ())} == {
                volume["name"] for volume in pod.get("volumes", ())
            }
            images.add(container["image"])
        assert {image.rpartition(":")[2] for image in images} == {spec["rayVersion"]}
        for group in spec["workerGroupSpecs"]:
            assert set(group) <= KNOWN["workers"]
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert f"rayproject/ray:{spec['rayVersion']}-py311" in (FILES / "Dockerfile").read_text(encoding="utf-8")


def test_ray_start_takes_the_parameters_of_every_group_as_kuberay_writes_them() -> None:
    try:
        from ray.scripts.scripts import start
    except ModuleNotFoundError:
        missing("ray", "Ray is not installed")
    taken = []
    for kind, group in groups():
        # KubeRay puts them into a line of a shell, with what it adds itself.
        given = group["rayStartParams"] | {"metrics-export-port": "8080"}
        given |= {"dashboard-host": "0.0.0.0"} if kind == "head" else {"address": "head:6379"}
        line = " ".join(f"--{name}={value}" for name, value in given.items())
        taken.append(start.make_context("start", shlex.split(f"{line} --block {'--head' * (kind == 'head')}")).params)
    assert [found["num_cpus"] for found in taken if found["head"]] == [0, 0]
    assert json.loads(taken[1]["resources"]) == {"sandbox": 16}


def test_the_ports_are_those_on_which_ray_listens() -> None:
    listens = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}
    for kind, group in groups():
        ports = {port["name"]: port["containerPort"] for port in container_of(group).get("ports", ())}
        assert ports.items() <= listens.items()
        assert kind == "worker" or ports.keys() >= {"gcs-server", "dashboard", "client"}
        assert not {"port", "dashboard-port", "ray-client-server-port"} & set(group["rayStartParams"])


def test_layers_and_caches_of_sandboxes_are_on_a_disk_and_their_worker_is_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """An overlay cannot have its upper layer on the container's own overlay, and only root may mount in a pod."""
    (workers,) = documents("raycluster.yaml")["RayCluster"]["spec"]["workerGroupSpecs"]
    container = container_of(workers)
    (mount,), (volume,) = container["volumeMounts"], workers["template"]["spec"]["volumes"]
    assert volume["name"] == mount["name"] and set(volume) == {"name", "emptyDir"}
    assert container["securityContext"] == {"privileged": True, "runAsUser": 0}
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    for folder in (run_directories.runtime_dir(create=False), data.cache_dir()):
        assert folder.is_relative_to(mount["mountPath"]) and str(folder) != mount["mountPath"]


def test_the_network_policy_is_about_the_pods_of_the_cluster() -> None:
    found = documents("raycluster.yaml")
    name = found["RayCluster"]["metadata"]["name"]
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == {"matchLabels": {"ray.io/cluster": name}} and policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    assert {"podSelector": policy["podSelector"]} in rule["from"] and all(rule["from"])


def test_the_training_run_of_the_job_is_one_that_the_trainer_takes() -> None:
    from bpo_ref.args import command_line

    python, flag, module, *arguments = shlex.split(documents("rayjob.yaml")["RayJob"]["spec"]["entrypoint"])
    assert (python, flag, module) == ("python", "-m", "bpo_ref.train")
    args = command_line(arguments)
    assert (args.envs, args.env_workers, args.env_timeout, args.ray_address) == ("ray", 16, 60.0, None)
    head = documents("rayjob.yaml")["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (mount,) = head["containers"][0]["volumeMounts"]
    assert args.out.startswith(mount["mountPath"] + "/")


def spoiled(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A group with one mistake, again and again with another."""
    for change in (
        lambda pod, container: container.update(volumMounts=[]),
        lambda pod, container: container.update(image=1),
        lambda pod, container: container["resources"]["limits"].update(memory="8 gigabytes"),
        lambda pod, container: pod.update(volumes=[{"emptyDir": {}}]),
        lambda pod, container: container.update(ports=[{"containerPort": "6379"}]),
    ):
        found = copy.deepcopy(group)
        change(found["template"]["spec"], container_of(found))
        yield found


QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
"""Quantities as the files have them: Kubernetes takes further forms, and its schemas any text."""


def test_pods_and_the_network_policy_agree_with_the_schemas_of_kubernetes() -> None:
    try:
        import kubernetes_validate
    except ModuleNotFoundError:
        missing("kubernetes", "kubernetes-validate is not installed")

    def complaint(document: dict[str, Any]) -> str:
        try:
            kubernetes_validate.validate(document, "1.34", strict=True)
        except kubernetes_validate.ValidationError as error:
            return str(error)
        resources = [each["resources"] for each in document["spec"].get("containers", ())]
        amounts = [amount for each in resources for part in each.values() for amount in part.values()]
        return "" if all(map(QUANTITY.fullmatch, amounts)) else f"quantities {amounts}"

    def pod(group: dict[str, Any]) -> dict[str, Any]:
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, "spec": group["template"]["spec"]}

    for _, group in groups():
        assert not complaint(pod(group))
        assert all(map(complaint, map(pod, spoiled(group))))
    policy = documents("raycluster.yaml")["NetworkPolicy"]
    assert not complaint(policy)
    policy["spec"]["ingress"][0]["form"] = policy["spec"]["ingress"][0].pop("from")
    assert complaint(policy)


def closed(schema: Any) -> Any:
    """A schema of KubeRay that refuses fields that it does not define, as a cluster does on request."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        found["properties"] = {name: closed(part) for name, part in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    return found


@pytest.mark.parametrize(("kind", "file"), [("RayCluster", "raycluster.yaml"), ("RayJob", "rayjob.yaml")])
def test_the_objects_agree_with_the_schemas_of_kuberay(kind: str, file: str) -> None:
    """Its definitions are in a folder that SANDBOXGYM_KUBERAY names: config/crd/bases of its operator's source."""
    folder = os.environ.get("SANDBOXGYM_KUBERAY")
    if not folder:
        missing("kuberay", "SANDBOXGYM_KUBERAY does not name a folder of KubeRay's definitions")
    from jsonschema import Draft7Validator

    definition = yaml.load((Path(folder) / f"ray.io_{kind.lower()}s.yaml").read_text(), Loader=yaml.CSafeLoader)
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    schema = Draft7Validator(closed(version["schema"]["openAPIV3Schema"]))
    document = documents(file)[kind]
    assert not list(schema.iter_errors(document))
    cluster = document["spec"] if kind == "RayCluster" else document["spec"]["rayClusterSpec"]
    for head in spoiled(cluster["headGroupSpec"]):
        cluster["headGroupSpec"] = head
        assert list(schema.iter_errors(document))


KINDS = {
    "/api/v1": ("v1", []),
    "/apis/ray.io/v1": ("ray.io/v1", ["RayCluster", "RayJob"]),
    "/apis/networking.k8s.io/v1": ("networking.k8s.io/v1", ["NetworkPolicy"]),
}


class _Kubernetes(BaseHTTPRequestHandler):
    """A cluster as far as a dry run of a client asks for it: which kinds there are, and that no such object exists."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        names = [version.split("/") for version, _ in KINDS.values() if "/" in version]
        entry = [{"groupVersion": f"{group}/{version}", "version": version} for group, version in names]
        answers: dict[str, Any] = {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [
                    {"name": group, "versions": [each], "preferredVersion": each}
                    for (group, _), each in zip(names, entry, strict=True)
                ],
            },
        }
        for place, (version, kinds) in KINDS.items():
            resources = [
                {"name": f"{kind.lower()}s".replace("ys", "ies"), "kind": kind, "namespaced": True, "verbs": ["create"]}
                for kind in kinds
            ]
            answers[place] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        body = json.dumps(answers.get(path, {"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}))
        self.send_response(200 if path in answers else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def kubernetes() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Kubernetes) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_dry_run_of_the_commands_of_the_page_would_send_the_objects(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        missing("kubectl", "there is no kubectl")
    page = (FILES.parents[1] / "fleet.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^kubectl .*$", page, re.M)]
    sent = []
    with kubernetes() as server:
        for program, *arguments in commands:
            dry = ["--dry-run=client", "--validate=false", "--output=json", f"--server={server}"]
            done = subprocess.run(
                [program, *arguments, *dry],
                cwd=FILES,
                env={**os.environ, "HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "none")},
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            sent += found["items"] if found["kind"] == "List" else [found]
    expected = [each for name in ("raycluster.yaml", "rayjob.yaml") for each in documents(name).values()]
    assert [each["spec"] for each in sent] == [each["spec"] for each in expected]
    assert [each["kind"] for each in sent] == ["RayCluster", "NetworkPolicy", "RayJob"]
