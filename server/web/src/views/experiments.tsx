/** The list of experiments, newest first. */

import { useState } from "preact/hooks";

import { all, get } from "../api";
import { Bulk, type Deed } from "../bulk";
import { clock, duration, number } from "../format";
import { merge, useEvents, useLoaded } from "../live";
import { Badge, Cell, ENDED, Labels, Problem, Progress, Select, Table, Trouble } from "../parts";
import type { Experiment, Info } from "../resources";
import { address, compareAddress, useChoice } from "../route";
import { type Column, Heads, measured, sorted, useOrder } from "../sorting";

const MOST_ROWS = 500;

const STATES: [string, string, (row: Experiment) => boolean][] = [
  ["", "every state", () => true],
  ["running", "not ended", (e) => !ENDED.includes(e.state)],
  ["waiting", "waiting", (e) => e.waiting_reason !== null || e.state === "PAUSED"],
  ["completed", "completed with a result", (e) => e.state === "COMPLETED" && !e.result_problem],
  ["problem", "ended without a result", (e) => Boolean(e.result_problem)],
  ["error", "error", (e) => e.state === "ERROR"],
  ["canceled", "canceled", (e) => e.state === "CANCELED"],
];

const seconds = (time: string | null): number | null => (time === null ? null : Date.parse(time));

const COLUMNS: Column<Experiment>[] = [
  { name: "id", value: (e) => e.id, falling: true },
  { name: "name", value: (e) => e.name.toLowerCase() },
  { name: "state", value: (e) => e.state },
  { name: "progress", value: (e) => e.progress },
  { name: "trials", value: (e) => e.num_trials, falling: true },
  { name: "best validation", value: (e) => measured(e.best_validation) },
  { name: "started", value: (e) => seconds(e.started_at), falling: true },
  { name: "took", value: (e) => (e.started_at === null ? null : (seconds(e.ended_at) ?? Date.now()) - seconds(e.started_at)!), falling: true },
];

const DEEDS: Deed[] = [
  { name: "pause", ask: "Their runs checkpoint and give their slots back." },
  { name: "activate", ask: "They go on as soon as there are slots." },
  { name: "cancel", ask: "Their trials stop at their next checkpoint, for good." },
  { name: "kill", ask: "Their trials stop now, without a checkpoint.", final: true },
  { name: "archive", ask: "They leave the list; their data stays." },
  { name: "unarchive", ask: "They come back into the list." },
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

export function Experiments() {
  const [text, setText] = useChoice("find");
  const [state, setState] = useChoice("state");
  const [archived, setArchived] = useChoice("archived");
  const [order, sort] = useOrder(COLUMNS, { name: "id", falling: true });
  const list = useLoaded("experiments", () => all<Experiment>("/experiments", "experiments"));
  const [ticked, setTicked] = useState(new Set<number>());
  const toggle = (id: number) => {
    const next = new Set(ticked);
    if (!next.delete(id)) next.add(id);
    setTicked(next);
  };
  const info = useLoaded("info", () => get<Info>("/info"));
  useEvents("/events", (changes) => {
    list.update((old) => merge(old, changes.experiments));
    if (changes.reload) list.reload();
    info.reload();
  });
  if (list.value === null) return list.error ? <Problem text={list.error} /> : <p class="muted">Reading…</p>;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const inState = STATES.find(([name]) => name === state)?.[2] ?? (() => true);
  const found = list.value
    .filter((e) => archived !== "" || !e.archived)
    .filter(inState)
    .filter((e) => {
      const known = [e.id, e.name, e.state, e.searcher_name, ...e.labels].join(" ").toLowerCase();
      return words.every((word) => known.includes(word));
    });
  const hidden = list.value.filter((e) => e.archived).length;
  const rows = sorted(found, COLUMNS, order);
  const shown = rows.slice(0, MOST_ROWS);
  const byId = new Map(list.value.map((e) => [e.id, e]));
  const chosen = [...ticked].filter((id) => byId.has(id));
  const allTicked = shown.length > 0 && shown.every((e) => ticked.has(e.id));
  return (
    <>
      {list.error && <Problem text={list.error} />}
      <header class="title">
        <h1>Experiments</h1>
        {info.value && <Cluster info={info.value} />}
      </header>
      {list.value.length === 0 ? (
        <div class="notice">
          No experiment yet. Submit one: <code>zerolab run examples/digits/experiment.yaml</code>
        </div>
      ) : (
        <>
          <div class="choice">
            <input
              type="search"
              placeholder="name, label or state"
              aria-label="search"
              value={text}
              onInput={(e) => setText(e.currentTarget.value)}
            />
            <Select name="state" value={state} options={STATES.map(([name, told]) => [name, told])} choose={setState} />
            {hidden > 0 && (
              <label>
                <input type="checkbox" checked={archived !== ""} onChange={(e) => setArchived(e.currentTarget.checked ? "1" : "")} />{" "}
                archived too ({hidden})
              </label>
            )}
            {chosen.length > 1 && <a href={compareAddress(chosen)}>compare {chosen.length}</a>}
            <Bulk noun="experiment" ids={chosen} deeds={DEEDS} fits={(deed, id) => fits(deed, byId.get(id)!)} done={list.reload} />
            {rows.length > MOST_ROWS && <span class="muted">the first {MOST_ROWS} of {number(rows.length)}</span>}
          </div>
          {rows.length === 0 ? (
            <p class="muted">None matches.</p>
          ) : (
            <Table
              head={
                <>
                  <th>
                    <input type="checkbox" aria-label="all of the list" checked={allTicked} onChange={() => setTicked(new Set(allTicked ? [] : shown.map((e) => e.id)))} />
                  </th>
                  <Heads columns={COLUMNS} order={order} sort={sort} />
                </>
              }
            >
              {shown.map((e) => (
                <Line key={e.id} row={e} ticked={ticked.has(e.id)} toggle={() => toggle(e.id)} />
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
  if (agents === 0) return <span class="muted">no agent is running: what is submitted waits</span>;
  return (
    <span class="muted">
      {free_slots} of {slots} slots free on {agents} {agents === 1 ? "agent" : "agents"}
    </span>
  );
}

function Line({ row: e, ticked, toggle }: { row: Experiment; ticked: boolean; toggle: () => void }) {
  return (
    <tr>
      <Cell>
        <input type="checkbox" checked={ticked} aria-label={`experiment ${e.id}`} onChange={toggle} />
      </Cell>
      <Cell name="id" kind="figure">
        {e.id}
      </Cell>
      <Cell kind="name">
        <a href={address(e.id)}>{e.name}</a>
        <Labels labels={e.labels} />
        <Trouble of={e} />
      </Cell>
      <Cell>
        <Badge of={e} />
      </Cell>
      <Cell name="progress">
        <Progress value={e.progress} />
      </Cell>
      <Cell name="trials" kind="figure">
        {number(e.num_trials)}
      </Cell>
      <Cell name="best validation" kind="figure">
        {number(e.best_validation)} <small class="muted">{e.best_validation !== null && e.metric}</small>
      </Cell>
      <Cell name="started" kind="figure">
        {clock(e.started_at)}
      </Cell>
      <Cell name="took" kind="figure">
        {duration(e.started_at, e.ended_at)}
      </Cell>
    </tr>
  );
}
