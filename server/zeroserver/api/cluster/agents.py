"""Routes of agents: list, read, enable, disable and delete."""

from typing import Annotated

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field

from zerolab.errors import NotFoundError
from zeroserver.api.cluster.cluster_queries import agent_list, load_history
from zeroserver.api.common import IdPath
from zeroserver.api.resources import AgentAnswer, AgentPage, LoadHistoryAnswer
from zeroserver.api.strict_route import resource_router
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import Services, ServicesDep

__all__ = ["router"]

router = resource_router("/api/v1/agents", "agents")

Slots = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=4096)]


@router.get("")
async def list_agents(services: ServicesDep) -> AgentPage:
    """List the agents and the runs on their slots."""
    return await services.read(
        lambda connection: AgentPage(agents=agent_list(services.orchestrator, connection))
    )


@router.get("/load-history")
async def get_load_history(services: ServicesDep) -> LoadHistoryAnswer:
    """Read the load of all slots in the last hour."""
    return await services.read(
        lambda connection: LoadHistoryAnswer(load_history(services.orchestrator, connection))
    )


@router.get("/{agent_id}")
async def get_agent(services: ServicesDep, agent_id: IdPath) -> AgentAnswer:
    """Read one agent."""
    return await _answer(services, agent_id)


async def _answer(services: Services, agent_id: int) -> AgentAnswer:
    agents = await services.read(lambda connection: agent_list(services.orchestrator, connection))
    for agent in agents:
        if agent.id == agent_id:
            return AgentAnswer(agent)
    msg = f"there is no agent {agent_id}"
    raise NotFoundError(msg)


class Disable(BaseModel):
    """Slots to disable."""

    model_config = ConfigDict(extra="forbid")

    slots: Slots | None = None
    """Ids of slots; the whole agent if missing."""
    drain: bool = False
    """Let the runs finish; otherwise they save a checkpoint now and resume on other slots."""


@router.post("/{agent_id}/disable")
async def disable_agent(
    services: ServicesDep, agent_id: IdPath, body: Disable | None = None
) -> AgentAnswer:
    """Disable an agent or some of its slots, so that no new runs start there; idempotent."""
    body = body or Disable()

    def job(work: UnitOfWork) -> bool:
        is_done = work.agents.close(agent_id, body.slots, drain=body.drain)
        work.scheduling.schedule()
        return is_done

    while not await services.write(job):
        pass
    return await _answer(services, agent_id)


class Enable(BaseModel):
    """Slots to enable."""

    model_config = ConfigDict(extra="forbid")

    slots: Slots | None = None
    """Ids of slots; if missing, the agent, but not slots that were disabled individually."""


@router.post("/{agent_id}/enable")
async def enable_agent(
    services: ServicesDep, agent_id: IdPath, body: Enable | None = None
) -> AgentAnswer:
    """Enable an agent or some of its slots again."""
    body = body or Enable()

    def job(work: UnitOfWork) -> None:
        work.agents.reopen(agent_id, body.slots)
        work.scheduling.schedule()

    await services.write(job)
    return await _answer(services, agent_id)


@router.delete("/{agent_id}", status_code=204)
async def delete_agent(services: ServicesDep, agent_id: IdPath) -> Response:
    """Delete an agent that is not alive; its runs stay in the history."""

    def job(work: UnitOfWork) -> None:
        work.agents.remove(agent_id)
        work.scheduling.schedule()

    await services.write(job)
    return Response(status_code=204)
