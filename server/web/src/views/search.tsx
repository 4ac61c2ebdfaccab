/** How the search goes: the rungs and who stands where, the best so far, what each trial cost. */

import { useMemo } from "preact/hooks";

import { finite, get } from "../api";
import { look } from "../chart/looks";
import { type Seen, metricOf } from "../columns";
import { number, seconds } from "../format";
import { useLoaded } from "../live";
import { ENDED, Problem } from "../parts";
import { type Axis, makeAxis } from "../plot/axis";
import { Dots, type Dot } from "../plot/dots";
import type { Experiment, Rung, SearcherAnswer, SearchProgress } from "../resources";
import { address, trialAddress } from "../route";

type Place = Map<number, number>;

interface Props {
  row: Experiment;
  trials: Seen[];
  at: Place;
  tick: number;
}

const go = (trial: number): void => {
  window.location.hash = trialAddress(trial).slice(1);
};

export function Search(props: Props) {
  const { row, trials } = props;
  if (trials.length === 0) return <p class="muted">{row.waiting_reason ?? "No trials yet."}</p>;
  return (
    <section>
      <Rungs {...props} />
      <BestSoFar {...props} />
      <Costs {...props} />
    </section>
  );
}

// -- rungs ---------------------------------------------------------------------------------------

const STATES = ["promoted", "paused", "stopped", "completed", "failed"] as const;
const MOST_NAMED = 40;

function Rungs({ row, at, tick }: Props) {
  const path = `/experiments/${row.id}/searcher`;
  const found = useLoaded(path, () => get<SearcherAnswer>(path).then((answer) => answer.searcher), `${tick} ${row.state}`);
  if (found.error) return <Problem text={found.error} />;
  const state = found.value;
  if (state === null) return <p class="muted">Loading…</p>;
  if (state.problem !== null) return state.problem === row.error ? null : <Problem text={state.problem} />;
  const unit = state.unit ?? "batches";
  if (state.brackets.length === 0) {
    return <p class="muted">The searcher {state.name} has no rungs: it does not stop trials early.</p>;
  }
  return (
    <>
      {state.brackets.map((bracket, place) => (
        <figure class="chart large" key={place} aria-label={`rungs of bracket ${place + 1}`}>
          <figcaption>
            <span>{state.brackets.length === 1 ? "rungs" : `rungs of bracket ${place + 1} of ${state.brackets.length}`}</span>
            <small class="muted">
              at most {number(bracket.trials)} trials{state.done && "; no more trials will start"}. Dots: promoted or completed, rings:
              paused, crosses: stopped or failed
            </small>
          </figcaption>
          <Ladder row={row} rungs={bracket.rungs} unit={unit} at={at} />
          <Standing row={row} rungs={bracket.rungs} unit={unit} />
        </figure>
      ))}
    </>
  );
}

function Ladder({ row, rungs, unit, at }: { row: Experiment; rungs: Rung[]; unit: string; at: Place }) {
  const [x, y, dots] = useMemo((): [Axis, Axis, Dot[]] => {
    const across = makeAxis("rung", unit, rungs.map((rung) => String(rung.length)));
    const metrics = rungs.flatMap((rung) => rung.entries.map((entry) => finite(entry.metric)));
    const up = makeAxis("metric", metricOf(row), metrics);
    const found = rungs.flatMap((rung, level) =>
      rung.entries.map((entry, rank): Dot => ({
        trial: entry.trial_id,
        x: (level + 0.15 + (0.7 * (rank + 0.5)) / rung.entries.length) / rungs.length,
        y: up.place(finite(entry.metric)),
        color: look(at.get(entry.trial_id) ?? 0).color,
        form: entry.state === "paused" ? "ring" : entry.state === "stopped" || entry.state === "failed" ? "cross" : "dot",
        words: `trial ${entry.trial_id} · ${rung.length} ${unit} · ${metricOf(row)} ${number(entry.metric)} · ${entry.state}, rank ${rank + 1} of ${rung.entries.length}`,
      })),
    );
    // Rungs stand in the order of their lengths, not of their names.
    const places = rungs.map((rung, level) => ({ at: (level + 0.5) / rungs.length, label: number(rung.length) }));
    return [{ ...across, ticks: places, gaps: false }, up, found];
  }, [rungs, at]);
  if (dots.length === 0) return <p class="muted">No trial has reached a rung yet.</p>;
  return <Dots title={`${metricOf(row)} at each rung`} x={x} y={y} dots={dots} height={280} pick={go} />;
}

/** The same in words and numbers. */
function Standing({ row, rungs, unit }: { row: Experiment; rungs: Rung[]; unit: string }) {
  return (
    <div class="table">
      <table class="rows">
        <thead>
          <tr>
            {[unit, "training", ...STATES, `best ${metricOf(row)}`].map((name) => (
              <th key={name}>{name}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rungs.map((rung) => (
            <tr key={rung.length}>
              <td class="figure" data-name={unit}>
                <b>{number(rung.length)}</b>
              </td>
              <td data-name="training">
                <Named ids={rung.training} />
              </td>
              {STATES.map((state) => (
                <td key={state} data-name={state}>
                  <Named ids={rung.entries.filter((entry) => entry.state === state).map((entry) => entry.trial_id)} />
                </td>
              ))}
              <td class="figure" data-name="best">
                {number(rung.entries[0]?.metric)}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Named({ ids }: { ids: number[] }) {
  if (ids.length === 0) return <span class="muted">–</span>;
  return (
    <details class="named">
      <summary>{number(ids.length)}</summary>
      {ids.slice(0, MOST_NAMED).map((id) => (
        <span key={id}>
          <a href={trialAddress(id)}>{id}</a>{" "}
        </span>
      ))}
      {ids.length > MOST_NAMED && <span class="muted">and {number(ids.length - MOST_NAMED)} more</span>}
    </details>
  );
}

// -- the best so far -----------------------------------------------------------------------------

const UNITS: [string, number][] = [["days", 86_400], ["hours", 3600], ["minutes", 60], ["seconds", 1]];

function BestSoFar({ row, at, tick }: Props) {
  const path = `/experiments/${row.id}/search-progress`;
  const found = useLoaded(path, () => get<SearchProgress>(path), `${tick} ${row.state}`);
  const better = found.value?.improvements ?? [];
  const made = useMemo(() => {
    const start = Date.parse(row.started_at ?? row.created_at);
    const passed = better.map((each) => Math.max(0, (Date.parse(each.time) - start) / 1000));
    const end = Math.max(1, (Date.parse(row.ended_at ?? new Date().toISOString()) - start) / 1000, ...passed);
    const [unit, size] = UNITS.find(([, length]) => end >= 2 * length) ?? UNITS[UNITS.length - 1]!;
    const x = makeAxis("time", `${unit} since the start`, [0, end / size]);
    const y = makeAxis("best", `best ${metricOf(row)}`, better.map((each) => finite(each.value)));
    const dots = better.map((each, i): Dot => ({
      trial: each.trial_id,
      x: x.place(passed[i]! / size),
      y: y.place(finite(each.value)),
      color: look(at.get(each.trial_id) ?? 0).color,
      form: "dot",
      words: `trial ${each.trial_id} · ${metricOf(row)} ${number(each.value)} · after ${seconds(passed[i]!)}${each.length === null ? "" : ` · at length ${number(each.length)}`}`,
    }));
    return { x, y, dots };
  }, [found.value, at, row.ended_at]);
  return (
    <figure class="chart large" aria-label="best so far">
      <figcaption>
        <span>best {metricOf(row)} so far</span>
        {found.value && (
          <small class="muted">
            {number(better.length)} {better.length === 1 ? "improvement" : "improvements"} in {number(found.value.validations)} validations
          </small>
        )}
      </figcaption>
      {found.error && <Problem text={found.error} />}
      {found.value && better.length === 0 ? (
        <p class="muted">
          {found.value.validations === 0
            ? ENDED.includes(row.state)
              ? "The searcher received no validations."
              : "No validations yet."
            : `None of ${number(found.value.validations)} validations has a finite value.`}
        </p>
      ) : (
        <Dots title={`best ${metricOf(row)} over time`} x={made.x} y={made.y} dots={made.dots} height={260} stairs pick={go} />
      )}
    </figure>
  );
}

// -- cost ----------------------------------------------------------------------------------------

const MOST_BARS = 12;

function Costs({ row, trials, at }: Props) {
  const dearest = useMemo(() => [...trials].sort((a, b) => b.slot_seconds - a.slot_seconds || a.id - b.id), [trials]);
  const total = trials.reduce((sum, trial) => sum + trial.slot_seconds, 0);
  const failed = trials.filter((trial) => trial.state === "ERROR");
  const lost = failed.reduce((sum, trial) => sum + trial.slot_seconds, 0);
  const bars = dearest.slice(0, MOST_BARS).filter((trial) => trial.slot_seconds > 0);
  const others = total - bars.reduce((sum, trial) => sum + trial.slot_seconds, 0);
  const most = Math.max(bars[0]?.slot_seconds ?? 0, others);
  const bar = (key: string | number, name: preact.ComponentChildren, cost: number, color: string, more: string) => (
    <tr key={key}>
      <th scope="row">{name}</th>
      <td class="bar-cell">
        <span style={{ width: `${(100 * cost) / most}%`, background: color }} />
      </td>
      <td class="figure">
        {seconds(cost)} <small class="muted">{Math.round((100 * cost) / total)} %{more}</small>
      </td>
    </tr>
  );
  return (
    <figure class="chart large" aria-label="cost">
      <figcaption>
        <span>cost</span>
        <small class="muted">
          slot time (slots × run time): {seconds(total)} in all trials
          {lost > 0 && `, ${seconds(lost)} in ${failed.length} failed trials`}
        </small>
      </figcaption>
      {bars.length === 0 ? (
        <p class="muted">No trial has been scheduled yet.</p>
      ) : (
        <table class="bars">
          <tbody>
            {bars.map((trial) =>
              bar(
                trial.id,
                <a href={trialAddress(trial.id)}>trial {trial.id}</a>,
                trial.slot_seconds,
                look(at.get(trial.id) ?? 0).color,
                `, ${metricOf(row)} ${number(trial.best_validation)}`,
              ),
            )}
            {trials.length > bars.length && bar("others", `${number(trials.length - bars.length)} others`, others, "var(--muted)", "")}
          </tbody>
        </table>
      )}
      <p class="choice" hidden={bars.length === 0}>
        <a href={`${address(row.id, "trials").split("?")[0]}?sort=-slot_seconds`}>all trials by cost</a>
      </p>
    </figure>
  );
}
