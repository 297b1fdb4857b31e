"""Events on the real API server: what is said again is counted."""

import pytest

from tests.shell.conftest import World
from tkcc.control.actions import EmitEvent, EventType
from tkcc.kube.resources import EVENT, JsonObject
from tkcc.shell.record import Recorder

pytestmark = pytest.mark.shell

PROMOTED = EmitEvent(EventType.NORMAL, "CandidatePromoted", "abc serves all")


async def events(world: World) -> list[JsonObject]:
    found = await world.admin.list(EVENT, world.namespace)
    return [event for event in found if event["involvedObject"]["kind"] == "InferenceDeployment"]


async def test_the_same_event_is_one_object_that_counts(world: World):
    obj = await world.apply()
    await Recorder(world.cluster, "one").post(obj, PROMOTED)
    again = Recorder(world.cluster, "a later process")
    await again.post(obj, PROMOTED)
    await again.post(obj, PROMOTED)  # within a minute: a repeat of the same turn
    [event] = await events(world)
    assert (event["count"], event["reason"], event["message"]) == (2, "CandidatePromoted", "abc serves all")
    assert event["involvedObject"]["uid"] == obj["metadata"]["uid"]
    assert event["lastTimestamp"] >= event["firstTimestamp"]


async def test_another_message_is_another_event(world: World):
    obj = await world.apply()
    recorder = Recorder(world.cluster, "one")
    for weight in (25, 50):
        await recorder.post(obj, EmitEvent(EventType.NORMAL, "TrafficWeightUpdated", f"{weight} %"))
    messages = sorted(event["message"] for event in await events(world))
    assert messages == ["25 %", "50 %"]


async def test_an_event_that_cannot_be_written_holds_nothing_up(world: World, caplog: pytest.LogCaptureFixture):
    obj = await world.apply()
    obj["metadata"]["namespace"] = "no-such-namespace"
    await Recorder(world.cluster, "one").post(obj, PROMOTED)
    assert "not posted" in caplog.text
