/** The list of experiments, newest first. */

import { all, type Experiment } from "../api";
import { clock, duration, number } from "../format";
import { useEvents, useLoaded } from "../live";
import { Badge, Problem, Progress } from "../parts";

export function Experiments() {
  const list = useLoaded("experiments", () => all<Experiment>("/experiments", "experiments"));
  useEvents("/events", list.reload);
  if (list.error) return <Problem text={list.error} />;
  if (list.value === null) return <p class="muted">Reading…</p>;
  if (list.value.length === 0) {
    return (
      <div class="notice">
        No experiment yet. Submit one: <code>zerolab run examples/digits/experiment.yaml</code>
      </div>
    );
  }
  const newest = [...list.value].sort((a, b) => b.id - a.id);
  return (
    <>
      <h1>Experiments</h1>
      <table class="rows">
        <thead>
          <tr>
            <th>id</th>
            <th>name</th>
            <th>state</th>
            <th>progress</th>
            <th>trials</th>
            <th>best validation</th>
            <th>started</th>
            <th>took</th>
          </tr>
        </thead>
        <tbody>
          {newest.map((e) => (
            <tr key={e.id}>
              <td>{e.id}</td>
              <td>
                <a href={`#/experiments/${e.id}`}>{e.name}</a>
                {e.labels.map((label) => (
                  <span class="label" key={label}>
                    {label}
                  </span>
                ))}
              </td>
              <td>
                <Badge state={e.state} />
              </td>
              <td>
                <Progress value={e.progress} state={e.state} />
              </td>
              <td>{e.num_trials}</td>
              <td title={e.metric}>{number(e.best_validation)}</td>
              <td>{clock(e.started_at)}</td>
              <td>{duration(e.started_at, e.ended_at)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}
