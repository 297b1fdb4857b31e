"""An artifact that several InferenceDeployments use, on the real API server: it goes with the last of them."""

import pytest

from tests.shell.conftest import World
from tkcc.kube.resources import CONFIG_MAP, INFERENCE_DEPLOYMENT
from tkcc.shell.artifacts import Artifacts
from tkcc.shell.render.names import Owner

pytestmark = pytest.mark.shell


async def owners(world: World, digest: str) -> dict[str, bool] | None:
    """Name -> is controller; None where the artifact is not there."""
    have = await world.admin.get(CONFIG_MAP, world.namespace, f"tkcc-artifact-{digest[:16]}")
    refs = have["metadata"].get("ownerReferences", []) if have else []
    return {ref["name"]: ref.get("controller", False) for ref in refs} if have else None


@pytest.fixture
async def first_and_second(world: World) -> tuple[Owner, Owner]:
    return Owner.of(await world.apply("first")), Owner.of(await world.apply("second"))


async def test_whoever_uses_it_is_an_owner_and_the_last_one_takes_it_along(world: World, first_and_second):
    first, second = first_and_second
    digest = await world.artifact("def build(): ...\n", first.reference)
    its, theirs = Artifacts(world.cluster, first), Artifacts(world.cluster, second)
    for _ in range(2):
        await its.hold(digest)
        await theirs.hold(digest)
    assert await owners(world, digest) == {"first": True, "second": False}
    await its.let_go(digest)
    assert await owners(world, digest) == {"second": False}
    await theirs.let_go(digest)
    assert await owners(world, digest) is None


async def test_one_that_somebody_made_by_hand_stays_theirs(world: World, first_and_second):
    first, _ = first_and_second
    digest = await world.artifact("def build(): ...\n")
    await Artifacts(world.cluster, first).hold(digest)
    assert await owners(world, digest) == {}


async def test_it_outlives_the_one_whose_run_found_it(world: World, kubelet, first_and_second):
    first, _ = first_and_second
    digest = await world.artifact("def build(): ...\n", first.reference)
    await world.apply("second", replicas=2, rollout={"artifact": digest})
    await world.until(lambda status: status.rollout is not None, "second")
    await world.turn("second")
    assert await owners(world, digest) == {"first": True, "second": False}
    await world.admin.delete(INFERENCE_DEPLOYMENT, world.namespace, "first")
    await world.turn("second")
    assert "second" in (await owners(world, digest) or {})
