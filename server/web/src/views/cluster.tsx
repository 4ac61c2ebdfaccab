/** The cluster: what waits, in its order and why, and the machines that could run it. */

import { useContext, useState } from "preact/hooks";

import { Allowed, Caller } from "./users/access";
import { get, patch, post, remove } from "../api";
import { bytes, number, seconds } from "../format";
import { useEvents, useEvery, useLoaded } from "../live";
import { Badge, Cell, Labels, Lazy, Problem, Raw, Table, Time, Trouble } from "../parts";
import type { Agent, AgentPage, Job, JobPage, LoadHistoryAnswer, MachineLoad, Pool, PoolPage, Slot, SlotHistory } from "../resources";
import { address, trialAddress } from "../route";

/** Between two looks at what tells no event: an agent that has fallen silent. */
const LOOK_MS = 10_000;

const POLICIES: Record<Pool["policy"], string> = {
  fair_share: "fair share: by priority, then fewest slots in use per weight",
  priority: "by priority, then in order of submission",
  fifo: "first in, first out",
};

interface Read {
  jobs: Job[];
  agents: Agent[];
  pools: Pool[];
}

async function read(): Promise<Read> {
  const [{ jobs }, { agents }, { pools }] = await Promise.all([get<JobPage>("/jobs"), get<AgentPage>("/agents"), get<PoolPage>("/pools")]);
  return { jobs, agents, pools };
}

type Do = (doing: Promise<unknown>) => void;

export function Cluster() {
  const found = useLoaded("cluster", read);
  const [problem, setProblem] = useState("");
  useEvents("/events", found.reload, 1000);
  useEvery(LOOK_MS, found.reload);
  if (found.value === null) return found.error ? <Problem text={found.error} /> : <p class="muted">Loading…</p>;
  const act: Do = (doing) => {
    setProblem("");
    doing.catch((failed: Error) => setProblem(failed.message)).finally(found.reload);
  };
  const { jobs, agents, pools } = found.value;
  const there = agents.filter((agent) => agent.state !== "gone");
  const free = pools.reduce((sum, pool) => sum + pool.free_slots, 0);
  const slots = pools.reduce((sum, pool) => sum + pool.slots, 0);
  return (
    <>
      {found.error && <Problem text={found.error} />}
      {problem && <Problem text={problem} />}
      <header class="title">
        <h1>Cluster</h1>
        <span class="muted">
          {number(free)} of {number(slots)} slots free on {number(there.length)} {there.length === 1 ? "agent" : "agents"}
        </span>
      </header>
      {pools.map((pool) => (
        <Queue key={pool.name} pool={pool} alone={pools.length === 1} jobs={jobs.filter((job) => job.pool === pool.name)} act={act} />
      ))}
      <SharedQuotas tick={found.value} />
      <h2>
        Agents <Raw path="/agents" />
      </h2>
      {agents.length === 0 ? (
        <div class="notice">
          No agents: experiments stay queued. Start one: <code>zerolab agent start</code>
        </div>
      ) : (
        <Agents agents={agents} pooled={pools.length > 1} act={act} />
      )}
    </>
  );
}

const quotas = () => import("./users/quotas").then((loaded) => loaded.Quotas);

/** Quotas, where several users share the slots: a chunk that a single user never loads. */
function SharedQuotas({ tick }: { tick: unknown }) {
  const shared = useContext(Caller)?.shared ?? false;
  return shared ? <Lazy load={quotas} with={{ tick }} quiet /> : null;
}

interface QueueProps {
  pool: Pool;
  /** Whether there is no other pool. */
  alone: boolean;
  /** In the order in which they start. */
  jobs: Job[];
  act: Do;
}

function Queue({ pool, alone, jobs, act }: QueueProps) {
  return (
    <section class="queue" aria-label={`queue of pool ${pool.name}`}>
      <h2>
        Queue{alone ? "" : ` of ${pool.name}`}{" "}
        <small class="muted">
          {POLICIES[pool.policy]}; {number(pool.free_slots)} of {number(pool.slots)} slots free
          {pool.max_slots !== null && `, at most ${number(pool.max_slots)} at a time`}
        </small>{" "}
        <Raw path={`/jobs?pool=${encodeURIComponent(pool.name)}`} />
      </h2>
      {jobs.length === 0 ? (
        <p class="muted">The queue is empty.</p>
      ) : (
        <Table
          head={["position", "experiment", ...extra(jobs), "state", "trials", "slots", "priority", "weight", "submitted"].map((name) => (
            <th key={name}>{name}</th>
          ))}
        >
          {jobs.map((job, at) => (
            <Line key={job.experiment_id} job={job} extra={extra(jobs)} above={jobs[at - 1]} below={jobs[at + 1]} first={jobs[0]!} act={act} />
          ))}
        </Table>
      )}
    </section>
  );
}

/** Columns that exist only with several users or projects. */
function extra(jobs: Job[]): ("owner" | "project")[] {
  return (["owner", "project"] as const).filter((key) => jobs.some((job) => job[key] !== null));
}

interface LineProps {
  job: Job;
  extra: ("owner" | "project")[];
  above: Job | undefined;
  below: Job | undefined;
  first: Job;
  act: Do;
}

function Line({ job, extra, above, below, first, act }: LineProps) {
  const path = `/jobs/${job.experiment_id}`;
  const move = (to: object) => act(post(`${path}/move`, to));
  const most = job.max_slots === null ? "" : `, at most ${number(job.max_slots)}`;
  return (
    <tr>
      <Cell name="position" kind="figure">
        {job.place ?? "–"}{" "}
        <span class="moves" role="group" aria-label={`move ${job.name}`}>
          <Allowed>
            <button type="button" title="move to the front" aria-label="first" disabled={!above} onClick={() => move({ ahead_of: first.experiment_id })}>
              ⤒
            </button>
            <button type="button" title="move up, with the priority of the job above" aria-label="up" disabled={!above} onClick={() => move({ ahead_of: above!.experiment_id })}>
              ↑
            </button>
            <button type="button" title="move down, with the priority of the job below" aria-label="down" disabled={!below} onClick={() => move({ behind: below!.experiment_id })}>
              ↓
            </button>
          </Allowed>
        </span>
      </Cell>
      <Cell kind="name">
        <div class="line">
          <a href={address(job.experiment_id)}>{job.name}</a> <small class="muted">{job.experiment_id}</small>
          <Labels labels={job.labels} />
          {(job.waiting_reason === null || job.waiting_reason !== above?.waiting_reason) && <Trouble of={{ ...job, error: null }} />}
        </div>
        {job.order_reason && <small class="muted">starts later: {job.order_reason}</small>}
      </Cell>
      {extra.map((key) => (
        <Cell key={key} name={key}>
          {job[key]}
        </Cell>
      ))}
      <Cell>
        <Badge of={job.running_trials > 0 ? { state: job.state } : job} />
      </Cell>
      <Cell name="trials" kind="figure">
        {number(job.running_trials)} running, {number(job.queued_trials)} waiting
      </Cell>
      <Cell name="slots" kind="figure">
        {number(job.held_slots)} in use, {number(job.slots_per_trial)}
        {job.host_slots > 0 && ` + ${number(job.host_slots)} on hosts`} per trial{most}
      </Cell>
      <Cell name="priority">
        <Figure name={`priority of ${job.name}`} value={job.priority} least={1} most={99} step="1" set={(priority) => act(patch(path, { priority }))} />
      </Cell>
      <Cell name="weight">
        <Figure name={`weight of ${job.name}`} value={job.weight} least={0} most={1_000_000} step="any" set={(weight) => act(patch(path, { weight }))} />
      </Cell>
      <Cell name="submitted" kind="figure">
        <Time at={job.created_at} />
      </Cell>
    </tr>
  );
}

interface FigureProps {
  name: string;
  value: number;
  least: number;
  most: number;
  step: string;
  set: (value: number) => void;
}

/** A number that may be changed; it is sent when the field is left, or with Enter.
 *
 * What is typed stays while the page is redrawn; Escape restores the old value.
 */
function Figure({ name, value, least, most, step, set }: FigureProps) {
  const [typed, setTyped] = useState<string | null>(null);
  return (
    <input
      type="number"
      aria-label={name}
      value={typed ?? value}
      min={least}
      max={most}
      step={step}
      required
      onInput={(event) => setTyped(event.currentTarget.value)}
      onKeyDown={(event) => event.key === "Escape" && setTyped(null)}
      onChange={(event) => {
        const field = event.currentTarget;
        if (!field.reportValidity()) return;
        setTyped(null);
        if (Number(field.value) !== value) set(Number(field.value));
      }}
    />
  );
}

function Agents({ agents, pooled, act }: { agents: Agent[]; pooled: boolean; act: Do }) {
  const history = useHistory();
  const heads = ["agent", ...(pooled ? ["pool"] : []), "state", "load", "slots", "last seen", "actions"];
  return (
    <Table head={heads.map((name) => <th key={name}>{name}</th>)}>
      {agents.map((agent) => (
        <tr key={agent.id} class={agent.state === "gone" ? "gone" : ""}>
          <Cell kind="name">
            {agent.name} {agent.host !== agent.name && <small class="muted">{agent.host}</small>}
          </Cell>
          {pooled && <Cell name="pool">{agent.pool}</Cell>}
          <Cell>
            <span class={`badge agent-${agent.state}`}>{agent.state}</span>
          </Cell>
          <Cell name="load">{agent.load && <Machine load={agent.load} />}</Cell>
          <Cell name="slots">
            <span class="slots">
              {agent.slots.map((slot) => (
                <OneSlot key={slot.id} agent={agent} slot={slot} act={act} />
              ))}
            </span>
            <Uses agent={agent} history={history} />
          </Cell>
          <Cell name="last seen" kind="figure">
            {agent.silent_s < 30 ? "now" : `${seconds(agent.silent_s)} ago`}
          </Cell>
          <Cell>
            <Allowed role="admin">
              <Deeds agent={agent} act={act} />
            </Allowed>
          </Cell>
        </tr>
      ))}
    </Table>
  );
}

interface LoadProps {
  name: string;
  value: number | null;
  /** Value of a full bar. */
  most: number;
  text: (value: number) => string;
}

/** A bar with a figure; nothing if it was not measured. */
function Load({ name, value, most, text }: LoadProps) {
  if (value === null) return null;
  return (
    <span class="progress load" title={`${name}: ${text(value)}`}>
      <small class="muted">{name}</small> <progress aria-label={name} value={Math.min(value, most)} max={most} /> <small>{text(value)}</small>
    </span>
  );
}

const percent = (value: number) => `${Math.round(value)} %`;

function Machine({ load }: { load: MachineLoad }) {
  return (
    <span class="loads">
      <Load name="CPU" value={load.cpu_percent} most={100} text={(value) => `${percent(value)} of ${number(load.cores)} cores`} />
      <Load name="memory" value={load.memory_bytes} most={load.memory_total_bytes} text={(value) => `${bytes(value)} of ${bytes(load.memory_total_bytes)}`} />
      <Load name="disk" value={load.disk_bytes} most={load.disk_total_bytes} text={(value) => `${bytes(value)} of ${bytes(load.disk_total_bytes)}`} />
    </span>
  );
}

/** Load of the slots in each minute of the last hour, by agent and slot. */
function useHistory(): Map<string, SlotHistory> {
  const found = useLoaded("load history", () => get<LoadHistoryAnswer>("/agents/load-history"));
  useEvery(60_000, found.reload);
  return new Map((found.value?.history ?? []).map((slot) => [`${slot.agent_id} ${slot.slot}`, slot]));
}

interface HistoryProps {
  history: SlotHistory;
  /** CPU time of a full bar, in percent of one core. */
  cpu: number;
}

/** Bars of the minutes of the last hour; no bar for a minute without a measurement. */
function History({ history: { gpu, percent: means }, cpu }: HistoryProps) {
  const measured = means.filter((mean) => mean !== null);
  const mean = measured.reduce((sum, one) => sum + one, 0) / measured.length;
  const label = `${gpu ? "GPU" : "CPU"} in the last hour: mean ${percent(mean)}, maximum ${percent(Math.max(...measured))}`;
  const most = gpu ? 100 : cpu;
  const bars = means.map((one, minute) => (one === null ? "" : `M${minute} 20v${-1 - (19 * Math.min(one, most)) / most}`));
  return (
    <svg class="history" role="img" aria-label={label} viewBox={`-.5 0 ${means.length} 20`} preserveAspectRatio="none">
      <title>{label}</title>
      <path d={bars.join("")} />
    </svg>
  );
}

/** Slots that are in use or were in the last hour: by what, whose it is, and their load. */
function Uses({ agent, history }: { agent: Agent; history: Map<string, SlotHistory> }) {
  const slots = agent.slots.map((slot) => ({ slot, hour: history.get(`${agent.id} ${slot.id}`) }));
  const used = slots.filter(({ slot, hour }) => slot.run_id !== null || slot.load !== null || hour !== undefined);
  if (used.length === 0) return null;
  const memory = agent.load?.memory_total_bytes ?? 1;
  const cpu = Math.max(100, (100 * (agent.load?.cores ?? 1)) / agent.slots.length);
  return (
    <ul class="uses" aria-label={`slots in use on ${agent.name}`}>
      {used.map(({ slot, hour }) => (
        <li key={slot.id}>
          <span class="figure">{slot.id}</span>
          <span>
            {slot.experiment_id !== null ? (
              <>
                <a href={address(slot.experiment_id)}>{slot.experiment}</a>{" "}
                {slot.trial_id !== null && <a href={trialAddress(slot.trial_id)}>trial {slot.trial_id}</a>}
              </>
            ) : slot.run_id !== null ? (
              <span class="muted">run {slot.run_id}</span>
            ) : (
              <span class="muted">free</span>
            )}
            {slot.owner && <small class="muted"> {slot.owner}</small>}
          </span>
          {hour && <History history={hour} cpu={cpu} />}
          {slot.load && (
            <span class="loads">
              <Load name="CPU" value={slot.load.cpu_percent} most={cpu} text={percent} />
              <Load name="memory" value={slot.load.memory_bytes} most={memory} text={bytes} />
              <Load name="GPU" value={slot.load.gpu_percent} most={100} text={percent} />
              <Load name="GPU memory" value={slot.load.gpu_memory_bytes} most={slot.load.gpu_memory_total_bytes ?? 1} text={bytes} />
            </span>
          )}
        </li>
      ))}
    </ul>
  );
}

/** A device: what holds it, and whether it takes more; a click says whether it may. */
function OneSlot({ agent, slot, act }: { agent: Agent; slot: Slot; act: Do }) {
  const run = slot.experiment === null ? `run ${slot.run_id}` : `${slot.experiment}, trial ${slot.trial_id}`;
  const what = slot.run_id !== null ? run : !slot.enabled ? "disabled" : slot.down ? "no node" : "free";
  const deed = slot.enabled ? "disable" : "enable";
  const label = `slot ${slot.id} (${slot.device}): ${what}${slot.run_id !== null && !slot.enabled ? ", draining" : ""}`;
  const wish = { slots: [slot.id], ...(slot.enabled ? { drain: true } : {}) };
  return (
    <button
      type="button"
      class={`slot ${slot.run_id !== null ? "held" : slot.enabled && !slot.down ? "free" : "off"}`}
      disabled={!agent.alive || !agent.enabled}
      aria-pressed={slot.enabled}
      aria-label={label}
      title={`${label}. Click: ${deed} it${slot.enabled && slot.run_id !== null ? "; its current run finishes" : ""}.`}
      onClick={() => act(post(`/agents/${agent.id}/${deed}`, wish))}
    >
      {slot.id}
    </button>
  );
}

function Deeds({ agent, act }: { agent: Agent; act: Do }) {
  const path = `/agents/${agent.id}`;
  if (!agent.alive) {
    return (
      <button type="button" title="remove the agent; its run history is kept" onClick={() => act(remove(path))}>
        remove
      </button>
    );
  }
  if (!agent.enabled) {
    return (
      <button type="button" onClick={() => act(post(`${path}/enable`, {}))}>
        enable
      </button>
    );
  }
  return (
    <>
      <button type="button" title="start no new runs; current runs finish" onClick={() => act(post(`${path}/disable`, { drain: true }))}>
        drain
      </button>{" "}
      <button type="button" title="start no new runs; current runs save a checkpoint and move to other agents" onClick={() => act(post(`${path}/disable`, {}))}>
        disable
      </button>
    </>
  );
}
