/** The list of experiments, newest first. */

import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";

import { all, get } from "../api";
import { Bulk, type Deed } from "../bulk";
import { Chooser, useColumns } from "../chooser";
import { constants, PREFIX, type Value } from "../columns";
import { duration, number } from "../format";
import { merge, useEvents, useLoaded } from "../live";
import { metricColumns, useCalm, useMeasured } from "../measured";
import { Badge, Cell, ENDED, Labels, Lazy, Problem, Progress, Raw, Select, Table, Time, Trouble } from "../parts";
import type { Experiment, ExperimentColumns, Info, MetricName, SharedExperiments } from "../resources";
import { address, compareAddress, projectAddress, useChoice } from "../route";
import { type Column, Heads, measured, sorted, useOrder } from "../sorting";
import { useCaller, useVisitor } from "./users/access";

const MOST_ROWS = 500;

const STATES: [string, string, (row: Experiment) => boolean][] = [
  ["", "All states", () => true],
  ["running", "Not finished", (e) => !ENDED.includes(e.state)],
  ["waiting", "Waiting", (e) => e.waiting_reason !== null || e.state === "PAUSED"],
  ["completed", "Completed", (e) => e.state === "COMPLETED" && !e.result_problem],
  ["failures", "Has failed trials", (e) => e.failed_trials > 0],
  ["problem", "No result", (e) => Boolean(e.result_problem)],
  ["error", "Error", (e) => e.state === "ERROR"],
  ["canceled", "Canceled", (e) => e.state === "CANCELED"],
];

const seconds = (time: string | null): number | null => (time === null ? null : Date.parse(time));

interface Shown extends Column<Experiment> {
  kind?: string;
  /** The name says why an experiment waits, unless the row above said the same. */
  cell: (row: Experiment, above?: Experiment) => ComponentChildren;
}

const took = (e: Experiment) => (e.started_at === null ? null : (seconds(e.ended_at) ?? Date.now()) - seconds(e.started_at)!);

const NAME = "name";
/** Shown as soon as there are several users. */
const OWNER = "owner";
/** Shown as soon as there are several projects. */
const PROJECT = "project";

/** Columns that are shown unless the reader says otherwise; the name always is. */
const COLUMNS: Shown[] = [
  { name: "id", value: (e) => e.id, falling: true, kind: "figure", cell: (e) => e.id },
  {
    name: NAME,
    value: (e) => e.name.toLowerCase(),
    kind: "name",
    cell: (e, above) => (
      <div class="line">
        <a href={address(e.id)}>{e.name}</a>
        <Labels labels={e.labels} />
        {(e.waiting_reason === null || e.waiting_reason !== above?.waiting_reason) && <Trouble of={e} />}
      </div>
    ),
  },
  { name: OWNER, value: (e) => e.owner, cell: (e) => e.owner },
  { name: PROJECT, value: (e) => e.project, cell: (e) => e.project && <a href={projectAddress(e.project)}>{e.project}</a> },
  { name: "state", value: (e) => e.state, cell: (e) => <Badge of={e} /> },
  { name: "progress", value: (e) => e.progress, cell: (e) => <Progress value={e.progress} /> },
  { name: "trials", value: (e) => e.num_trials, falling: true, kind: "figure", cell: (e) => number(e.num_trials) },
  {
    name: "best validation",
    value: (e) => measured(e.best_validation),
    kind: "figure",
    cell: (e) => (
      <>
        {number(e.best_validation)} <small class="muted">{e.best_validation !== null && e.metric}</small>
      </>
    ),
  },
  { name: "started", value: (e) => seconds(e.started_at), falling: true, kind: "figure", cell: (e) => <Time at={e.started_at} /> },
  { name: "duration", value: took, falling: true, kind: "figure", cell: (e) => duration(e.started_at, e.ended_at) },
];
/** Columns whose cells say themselves what they are, where there is no room for heads. */
const NAMELESS = [NAME, "state"];
const USUAL = COLUMNS.map((column) => column.name);

const plain = (name: string, value: (row: Experiment) => Value): Shown => ({
  name,
  value: (e) => {
    const found = value(e);
    return typeof found === "boolean" ? String(found) : found;
  },
  kind: "figure",
  cell: (e) => formatCell(value(e)),
});

function formatCell(value: Value): string {
  return value === null ? "–" : typeof value === "number" ? number(value) : String(value);
}

const inside = (e: Experiment, block: string, key: string): Value => ((e.config[block] as Record<string, Value> | undefined)?.[key] ?? null);

/** Columns that are shown to who asks for them. */
const MORE: Shown[] = [
  plain("description", (e) => e.description || null),
  plain("searcher", (e) => e.searcher_name),
  plain("metric", (e) => e.metric),
  { ...plain("failed trials", (e) => e.failed_trials), falling: true },
  plain("best trial", (e) => e.best_trial_id),
  plain("forked from", (e) => e.forked_from),
  plain("slots per trial", (e) => inside(e, "resources", "slots_per_trial")),
  plain("pool", (e) => inside(e, "resources", "resource_pool")),
  plain("priority", (e) => inside(e, "resources", "priority")),
  { name: "submitted", value: (e) => seconds(e.created_at), falling: true, kind: "figure", cell: (e) => <Time at={e.created_at} /> },
  { name: "ended", value: (e) => seconds(e.ended_at), falling: true, kind: "figure", cell: (e) => <Time at={e.ended_at} /> },
];

/** The columns that a list has because of what its experiments are: hyperparameters and metrics. */
function own(list: Experiment[]): Shown[] {
  const spaces = new Map(list.map((e) => [e.id, constants(e.config.hyperparameters)]));
  const names = [...new Set([...spaces.values()].flatMap((space) => Object.keys(space)))].sort();
  const metrics = [...new Set(list.map((e) => e.metric))].filter((metric): metric is string => metric !== null && metric !== "validation").sort(); // that column is there
  return [
    ...metrics.map((metric) => plain(`best ${metric}`, (e) => (e.metric === metric ? measured(e.best_validation) : null))),
    ...names.map((name) => plain(PREFIX + name, (e) => spaces.get(e.id)?.[name] ?? null)),
  ];
}

/** Metrics of the best trials, by the columns' names; those that are not shown are not read. */
function useMetrics(names: MetricName[], wanted: (name: string) => boolean, tick: number): { columns: Shown[]; error: string | null } {
  const there = metricColumns(names);
  const keys = there.filter(({ name }) => wanted(name)).map(({ key }) => key);
  const { at, error } = useMeasured("/experiments/columns", keys, tick);
  const columns = there.map(({ key, name, falling }): Shown => ({ ...plain(name, (e) => measured(at(e.id)[key] ?? null)), falling }));
  return { columns, error };
}

const DEEDS: Deed[] = [
  { name: "pause", ask: "Their runs save a checkpoint and release their slots." },
  { name: "activate", ask: "They resume when slots are free." },
  { name: "cancel", ask: "Their trials save a checkpoint and stop." },
  { name: "kill", ask: "Their trials stop immediately, without a checkpoint.", final: true },
  { name: "archive", ask: "They are hidden from the list. Their data is kept." },
  { name: "unarchive", ask: "They are shown in the list again." },
  { name: "delete", ask: "Their metrics, logs and checkpoints are deleted. This cannot be undone.", final: true },
];

/** Whether a deed means something for an experiment as it stands. */
function fits(deed: string, e: Experiment): boolean {
  const ended = ENDED.includes(e.state);
  if (deed === "pause") return e.state === "ACTIVE";
  if (deed === "activate") return e.state === "PAUSED";
  if (deed === "archive") return ended && !e.archived;
  if (deed === "unarchive") return e.archived;
  return deed === "delete" ? ended : !ended;
}

const share = () => import("./team").then((module) => module.ShareButton);
const views = () => import("./team").then((module) => module.Views);
const groups = () => import("./team").then((module) => module.Groups);

const GROUPS = ["user", "project", "label", "state", "resources.resource_pool", "searcher.name"];

/** All experiments; for a visitor, those of the share link. */
const readList = (visitor: boolean): Promise<Experiment[]> =>
  visitor ? get<SharedExperiments>("/shared").then((answer) => answer.experiments) : all<Experiment>("/experiments", "experiments");

const move = () => import("./users/projects").then((module) => module.Move);

export function Experiments({ several }: { several: boolean }) {
  const [text, setText] = useChoice("find");
  const [state, setState] = useChoice("state");
  const [archived, setArchived] = useChoice("archived");
  const [mine, setMine] = useChoice("mine");
  const [project, setProject] = useChoice("project");
  const caller = useCaller();
  const visitor = useVisitor();
  const list = useLoaded("experiments", () => readList(visitor));
  const [tick, setTick] = useState(0);
  const names = useLoaded("metrics", () => get<ExperimentColumns>("/experiments/columns").then((answer) => answer.names), useCalm(tick));
  const columns = useColumns("experiments", (name) => USUAL.includes(name));
  const metrics = useMetrics(names.value ?? [], columns.shown, tick);
  const more = useMemo(() => [...MORE, ...own(list.value ?? [])], [list.value]);
  const shared = list.value?.some((e) => e.owner !== null) ?? false;
  const known = [...COLUMNS.filter(({ name }) => (shared || name !== OWNER) && ((several && project === "") || name !== PROJECT)), ...more, ...metrics.columns];
  const [order, sort] = useOrder(known, { name: "id", falling: true });
  const heads = known.filter(({ name }) => name === NAME || columns.shown(name));
  const [ticked, setTicked] = useState(new Set<number>());
  const toggle = (id: number) => {
    const next = new Set(ticked);
    if (!next.delete(id)) next.add(id);
    setTicked(next);
  };
  const info = useLoaded("info", () => (visitor ? Promise.resolve(null) : get<Info>("/info")));
  const [group, setGroup] = useChoice("group");
  useEvents(visitor ? null : "/events", (changes) => {
    list.update((old) => merge(old, changes.experiments));
    if (changes.reload) list.reload();
    setTick(tick + 1);
    info.reload();
  });
  if (list.value === null) return list.error ? <Problem text={list.error} /> : <p class="muted">Loading…</p>;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const inState = STATES.find(([name]) => name === state)?.[2] ?? (() => true);
  const found = list.value
    .filter((e) => archived !== "" || !e.archived)
    .filter((e) => mine === "" || caller === null || e.owner === null || e.owner === caller.user)
    .filter((e) => project === "" || e.project === project)
    .filter(inState)
    .filter((e) => {
      const known = [e.id, e.name, e.owner ?? "", e.state, e.searcher_name, ...e.labels].join(" ").toLowerCase();
      return words.every((word) => known.includes(word));
    });
  const spaces = [...new Set(list.value.flatMap((e) => Object.keys(constants(e.config.hyperparameters))))].sort().map((name) => `hyperparameters.${name}`);
  const hidden = list.value.filter((e) => e.archived).length;
  const projects = [...new Set([...list.value.map((e) => e.project), project || null])].filter((name) => name !== null).sort();
  const rows = sorted(found, known, order);
  const shown = rows.slice(0, MOST_ROWS);
  const byId = new Map(list.value.map((e) => [e.id, e]));
  const chosen = [...ticked].filter((id) => byId.has(id));
  const allTicked = shown.length > 0 && shown.every((e) => ticked.has(e.id));
  return (
    <>
      {(list.error ?? metrics.error) && <Problem text={(list.error ?? metrics.error)!} />}
      <header class="title">
        <h1>
          {several && project && <small class="muted">Project</small>} {several && project ? project : "Experiments"}
        </h1>
        <span>
          {info.value && <Cluster info={info.value} />} <Raw path="/experiments" />
        </span>
      </header>
      {list.value.length === 0 ? (
        <div class="notice">
          No experiments yet. Submit one: <code>zerolab run examples/digits/experiment.yaml</code>
        </div>
      ) : (
        <>
          <div class="choice">
            <input
              type="search"
              placeholder="Name, label or state"
              aria-label="search"
              value={text}
              onInput={(e) => setText(e.currentTarget.value)}
            />
            <Select name="state" value={state} options={STATES.map(([name, label]) => [name, label])} choose={setState} />
            {several && <Select name="project" value={project} options={[["", "All projects"], ...projects.map((name): [string, string] => [name, name])]} choose={setProject} />}
            {shared && (
              <label>
                <input type="checkbox" checked={mine !== ""} onChange={(e) => setMine(e.currentTarget.checked ? "1" : "")} /> Mine
              </label>
            )}
            {hidden > 0 && (
              <label>
                <input type="checkbox" checked={archived !== ""} onChange={(e) => setArchived(e.currentTarget.checked ? "1" : "")} />{" "}
                Show archived ({hidden})
              </label>
            )}
            {chosen.length > 1 && <a href={compareAddress(chosen)}>compare {chosen.length}</a>}
            <Bulk noun="experiment" ids={chosen} deeds={DEEDS} fits={(deed, id) => fits(deed, byId.get(id)!)} done={list.reload} />
            {several && chosen.length > 0 && <Lazy load={move} with={{ ids: chosen, done: list.reload }} quiet />}
            <Chooser columns={known.filter(({ name }) => name !== NAME).map(({ name }) => [name, titleOf(name)])} chosen={columns} />
            <Select name="group by" value={group} options={[["", "Not grouped"], ...[...GROUPS, ...spaces].map((name): [string, string] => [name, `By ${titleOf(name)}`])]} choose={setGroup} />
            {!visitor && <Lazy load={views} with={{ columns: columns.text }} quiet />}
            {!visitor && <Lazy load={share} with={{ ids: (chosen.length > 0 ? chosen : rows.map((e) => e.id)) }} quiet />}
            {rows.length > MOST_ROWS && <span class="muted">Showing the first {MOST_ROWS} of {number(rows.length)}</span>}
          </div>
          {rows.length === 0 ? (
            <p class="muted">No matches.</p>
          ) : group ? (
            <Lazy key="groups" load={groups} with={{ rows, by: group }} />
          ) : (
            <Table
              head={
                <>
                  <th>
                    <input type="checkbox" aria-label="select all" checked={allTicked} onChange={() => setTicked(new Set(allTicked ? [] : shown.map((e) => e.id)))} />
                  </th>
                  <Heads columns={heads} order={order} sort={sort} />
                </>
              }
            >
              {shown.map((e, at) => (
                <Line key={e.id} row={e} above={shown[at - 1]} heads={heads} ticked={ticked.has(e.id)} toggle={() => toggle(e.id)} />
              ))}
            </Table>
          )}
        </>
      )}
    </>
  );
}

function Cluster({ info }: { info: Info }) {
  const { agents, slots, free_slots } = info.cluster;
  if (agents === 0) return <span class="muted">no agents are running: experiments stay queued</span>;
  return (
    <span class="muted">
      {free_slots} of {slots} slots free on {agents} {agents === 1 ? "agent" : "agents"}
    </span>
  );
}

const titleOf = (name: string): string => (name.startsWith(PREFIX) ? name.slice(PREFIX.length) : name.startsWith("hyperparameters.") ? name.slice(16) : name);

interface LineProps {
  row: Experiment;
  above: Experiment | undefined;
  heads: Shown[];
  ticked: boolean;
  toggle: () => void;
}

function Line({ row: e, above, heads, ticked, toggle }: LineProps) {
  return (
    <tr>
      <Cell>
        <input type="checkbox" checked={ticked} aria-label={`experiment ${e.id}`} onChange={toggle} />
      </Cell>
      {heads.map(({ name, kind, cell }) => (
        <Cell key={name} name={NAMELESS.includes(name) ? undefined : titleOf(name)} kind={kind}>
          {cell(e, above)}
        </Cell>
      ))}
    </tr>
  );
}
