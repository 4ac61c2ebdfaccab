/** The list of experiments, newest first. */

import { useState } from "preact/hooks";

import { all, get } from "../api";
import type { Experiment, Info } from "../resources";
import { clock, duration, number } from "../format";
import { merge, useEvents, useLoaded } from "../live";
import { Badge, Problem, Progress, Table } from "../parts";
import { address } from "../route";

const MOST_ROWS = 500;

export function Experiments() {
  const [text, setText] = useState("");
  const [archived, setArchived] = useState(false);
  const list = useLoaded("experiments", () => all<Experiment>("/experiments", "experiments"));
  const info = useLoaded("info", () => get<Info>("/info"));
  useEvents("/events", (changes) => {
    list.update((old) => merge(old, changes.experiments));
    if (changes.reload) list.reload();
    info.reload();
  });
  if (list.value === null) return list.error ? <Problem text={list.error} /> : <p class="muted">Reading…</p>;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = list.value
    .filter((e) => archived || !e.archived)
    .filter((e) => {
      const known = [e.id, e.name, e.state, e.searcher_name, ...e.labels].join(" ").toLowerCase();
      return words.every((word) => known.includes(word));
    })
    .sort((a, b) => b.id - a.id);
  const hidden = list.value.filter((e) => e.archived).length;
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
            {hidden > 0 && (
              <label>
                <input type="checkbox" checked={archived} onChange={(e) => setArchived(e.currentTarget.checked)} /> archived
                too ({hidden})
              </label>
            )}
            {found.length > MOST_ROWS && <span class="muted">the newest {MOST_ROWS} of {number(found.length)}</span>}
          </div>
          <Rows rows={found.slice(0, MOST_ROWS)} />
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

function Rows({ rows }: { rows: Experiment[] }) {
  if (rows.length === 0) return <p class="muted">None matches.</p>;
  const head = ["id", "name", "state", "progress", "trials", "best validation", "started", "took"];
  return (
    <Table head={head.map((name) => <th key={name}>{name}</th>)}>
      {rows.map((e) => (
        <tr key={e.id}>
          <td class="figure">{e.id}</td>
          <td>
            <a href={address(e.id)}>{e.name}</a>
            {e.labels.map((label) => (
              <span class="label" key={label}>
                {label}
              </span>
            ))}
            {e.error && <small class="problem">{e.error.trim().split("\n")[0]}</small>}
          </td>
          <td>
            <Badge state={e.state} />
          </td>
          <td>
            <Progress value={e.progress} />
          </td>
          <td class="figure">{number(e.num_trials)}</td>
          <td class="figure">
            {number(e.best_validation)} <small class="muted">{e.best_validation !== null && e.metric}</small>
          </td>
          <td class="figure">{clock(e.started_at)}</td>
          <td class="figure">{duration(e.started_at, e.ended_at)}</td>
        </tr>
      ))}
    </Table>
  );
}
