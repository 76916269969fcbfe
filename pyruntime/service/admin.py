"""AdminService: models loaded and taken away while the server runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from google.protobuf import duration_pb2
from pydantic import ValidationError

from pyruntime.config import OPTIONS, Settings
from pyruntime.errors import InvalidField
from pyruntime.lifecycle import ModelManager
from pyruntime.registry import ModelRegistry, ModelState, ModelStatus, ServedModel
from pyruntime.service.convert import model_message
from pyruntime.service.validate import check_range, show
from pyruntime.types import Task
from pyruntime.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from pyruntime.scheduler.load import SchedulerLoad

MAX_NAME_BYTES = 256
MAX_PATH_BYTES = 4096
MAX_GRACE_S = 3600

STATES = {
    ModelState.LOADING: admin_pb2.MODEL_STATE_LOADING,
    ModelState.SERVING: admin_pb2.MODEL_STATE_SERVING,
    ModelState.FAILED: admin_pb2.MODEL_STATE_FAILED,
    ModelState.UNLOADING: admin_pb2.MODEL_STATE_UNLOADING,
}


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Hands everything to the model manager; what became of it stands in the registry."""

    def __init__(self, registry: ModelRegistry, manager: ModelManager, settings: Settings) -> None:
        self._registry = registry
        self._manager = manager
        self._settings = settings

    async def LoadModel(
        self, request: admin_pb2.LoadModelRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.LoadModelResponse:
        name = _checked_text("name", request.name, MAX_NAME_BYTES)
        path = _checked_text("path", request.path, MAX_PATH_BYTES)
        settings = _with_options(self._settings, request.options)
        self._registry.refuse_if_draining()
        await self._manager.load(name, path, settings=settings, is_late=True).wait()
        return admin_pb2.LoadModelResponse(model=model_message(self._registry.resolve(name, None), self._settings))

    async def UnloadModel(
        self, request: admin_pb2.UnloadModelRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.UnloadModelResponse:
        if not request.name:
            raise InvalidField("name", "is empty")
        grace_s = self._grace_s(request)
        self._registry.refuse_if_draining()
        num_ended = await self._manager.unload(request.name, grace_s)
        return admin_pb2.UnloadModelResponse(ended_requests=num_ended)

    async def ListModelStates(
        self, request: admin_pb2.ListModelStatesRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListModelStatesResponse:
        return admin_pb2.ListModelStatesResponse(models=[_status_message(each) for each in self._registry.statuses()])

    def _grace_s(self, request: admin_pb2.UnloadModelRequest) -> float:
        if not request.HasField("grace"):
            return self._settings.drain_grace_s
        # By hand: the message's own conversion raises for numbers that are no duration.
        seconds = request.grace.seconds + request.grace.nanos / 1e9
        check_range("grace", seconds, 0, MAX_GRACE_S)
        return seconds


def _checked_text(field: str, text: str, max_bytes: int) -> str:
    size = len(text.encode())
    if not 1 <= size <= max_bytes:
        raise InvalidField(field, f"has {size} bytes; allowed: 1 to {max_bytes}")
    if text.isspace() or not text.isprintable():
        raise InvalidField(field, f"{show(text)} is blank or has control characters")
    return text


def _with_options(settings: Settings, options: admin_pb2.LoadOptions) -> Settings:
    """The server's settings with those that the request has for itself, checked as the server's are."""
    own = {field.name: value for field, value in options.ListFields()}
    try:
        return Settings.model_validate(dict(settings) | own)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        problem = f"{show(str(own[name]))} is not allowed; allowed: {OPTIONS.allowed(name)}"
        raise InvalidField(f"options.{name}", problem) from error


def _status_message(status: ModelStatus) -> admin_pb2.ModelStatus:
    load = _load_message(status.model) if status.model is not None else None
    state = STATES[status.state]
    return admin_pb2.ModelStatus(name=status.name, path=status.source, state=state, failure=status.failure, load=load)


def _load_message(model: ServedModel) -> admin_pb2.ModelLoad:
    load = model.engine.load()
    step_age = duration_pb2.Duration()
    step_age.FromNanoseconds(int(load.seconds_in_step * 1e9))
    return admin_pb2.ModelLoad(
        open_requests=load.num_requests,
        queued_tokens=load.num_queued_tokens,
        tokens_per_second=load.tokens_per_s,
        steps=load.num_steps,
        step_age=step_age,
        tasks=[_task_message(task, load.scheduler) for task in Task],
        paused_sequences=load.scheduler.num_paused,
        kv_blocks_used=load.scheduler.blocks_used,
        kv_blocks_free=load.scheduler.blocks_free,
        kv_blocks_cached=load.scheduler.blocks_cached,
    )


def _task_message(task: Task, load: SchedulerLoad) -> admin_pb2.TaskLoad:
    return admin_pb2.TaskLoad(
        task=task.value,
        waiting_sequences=load.num_waiting[task],
        waiting_tokens=load.waiting_tokens[task],
        running_sequences=load.num_running[task],
        running_tokens=load.running_tokens[task],
    )
