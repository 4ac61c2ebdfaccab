/** What hyperparameters do: parallel coordinates, any two as a scatter, and which of them matter. */

import { useMemo } from "preact/hooks";

import { get } from "../api";
import { look } from "../chart/looks";
import { cell, type Condition, heads, METRICS, PREFIX, type Seen, spaceOf, titled, varying, metricOf } from "../columns";
import { number } from "../format";
import { useLoaded } from "../live";
import { Problem, Select } from "../parts";
import { type Axis, makeAxis, wide, written } from "../plot/axis";
import { Dots, type Dot } from "../plot/dots";
import { type Brush, type Line, Parallel } from "../plot/parallel";
import type { Experiment, Importance as Found, TrialColumns } from "../resources";
import { address, trialAddress, useChoice } from "../route";
import { ranked } from "../sorting";
import { USUAL_TRIALS } from "../chart/drawn";
import { Filters, useConditions } from "./filters";

/** Axes that are shown before others are asked for. */
const FEW_AXES = 8;
/** From the worst to the best. */
const SCALE = ["#9aa3b2", "#7a9bd0", "#2f6fed", "#7048e8", "#c2255c"];

interface Props {
  row: Experiment;
  trials: Seen[];
  at: Map<number, number>;
  tick: number;
}

const go = (trial: number): void => {
  window.location.hash = trialAddress(trial).slice(1);
};

export function Hyperparameters(props: Props) {
  const { row, trials } = props;
  const names = useMemo(() => varying(trials), [trials]);
  const short = useMemo(() => heads(trials), [trials]);
  const [where] = useConditions();
  const { kept, known, error } = useKept(props, where);
  if (trials.length === 0) return <p class="muted">{row.waiting_reason ?? "No trials yet."}</p>;
  if (trials.length === 1) return <p class="muted">There is only one trial.</p>;
  if (names.length === 0) return <p class="muted">All trials have the same hyperparameters.</p>;
  const best = ranked(kept, row.smaller_is_better).slice(0, USUAL_TRIALS).map((trial) => trial.id);
  return (
    <section>
      <Filters names={names} metric={metricOf(row)} count={where.length === 0 ? `${number(trials.length)} trials` : known ? `${number(kept.length)} of ${number(trials.length)} trials` : ""} />
      {error && <Problem text={error} />}
      {where.length > 0 && kept.length > 0 && (
        <p class="choice">
          <a href={address(row.id, "trials")}>show in table</a>
          <a href={address(row.id, "curves", best)}>curves of the best {best.length}</a>
        </p>
      )}
      <Coordinates {...props} names={names} kept={kept} short={short} />
      <Scatter {...props} names={names} kept={kept} short={short} />
      <Importance {...props} />
    </section>
  );
}

interface Kept {
  kept: Seen[];
  /** Whether they are those of the conditions as they are now; else of the ones before. */
  known: boolean;
  error: string | null;
}

/** The trials for which all conditions hold, as the server says. */
function useKept({ row, trials, tick }: Props, where: Condition[]): Kept {
  const text = JSON.stringify(where);
  const path = `/experiments/${row.id}/columns?column=id&where=${encodeURIComponent(text)}`;
  const load = async () => (where.length === 0 ? null : { text, ids: new Set((await get<TrialColumns>(path)).columns.id) });
  const found = useLoaded(`kept ${row.id}`, load, `${tick} ${text}`);
  const ids = found.value?.ids;
  const kept = useMemo(() => (where.length === 0 || !ids ? trials : trials.filter((trial) => ids.has(trial.id))), [trials, ids, where.length === 0]);
  return { kept, known: found.value?.text === text, error: where.length === 0 ? null : found.error };
}

type Parts = Props & { names: string[]; kept: Seen[]; short: Map<string, string> };

/** The colour of each trial: its own, or how good it is. */
function useColors({ row, trials, at }: Props): [string, (value: string) => void, (trial: Seen) => string] {
  const [by, setBy] = useChoice("color", "metric");
  const place = useMemo(() => {
    const order = ranked(trials.filter((trial) => typeof trial.best_validation === "number"), row.smaller_is_better);
    return new Map(order.map((trial, rank) => [trial.id, 1 - rank / Math.max(1, order.length - 1)]));
  }, [trials, row.smaller_is_better]);
  const color = (trial: Seen) => {
    if (by !== "metric") return look(at.get(trial.id) ?? 0).color;
    const found = place.get(trial.id);
    return found === undefined ? SCALE[0]! : SCALE[Math.min(SCALE.length - 1, Math.floor(found * SCALE.length))]!;
  };
  return [by, setBy, color];
}

const words = (row: Experiment, trial: Seen, short: Map<string, string>): string =>
  `trial ${trial.id}${trial.state === "ERROR" ? " (failed)" : ""} · ${metricOf(row)} ${number(trial.best_validation)} · ${Object.entries(trial.hparams)
    .map(([name, value]) => `${short.get(name)} ${written(value)}`)
    .join(", ")}`;

/** A set of columns in the address. */
function useSet(name: string): [Set<string>, (column: string) => void] {
  const [text, setText] = useChoice(name);
  const found = new Set(text.split(",").filter(Boolean));
  const toggle = (column: string) => {
    if (!found.delete(column)) found.add(column);
    setText([...found].join(","));
  };
  return [found, toggle];
}

/** The axis of a column: logarithmic where the search was, or where values span much; or the other way. */
function axisOf(row: Experiment, trials: Seen[], column: string, flipped: Set<string>): Axis {
  const cells = trials.map((trial) => cell(trial, column));
  const space = column.startsWith(PREFIX) ? spaceOf(row.config, column.slice(PREFIX.length)) : null;
  const log = space === "log" || (space !== "double" && space !== "int" && wide(cells));
  return makeAxis(column, titled(column, metricOf(row)), cells, log !== flipped.has(column));
}

function Coordinates(props: Parts) {
  const { row, trials, names, kept, at, short } = props;
  const [by, setBy, color] = useColors(props);
  const [flipped, flip] = useSet("flip");
  const [changed, change] = useSet("axes");
  const [where, setWhere] = useConditions();
  const all = [...names.map((name) => PREFIX + name), "slot_seconds", "best_validation"];
  const usual = new Set([...all.slice(0, Math.min(names.length, FEW_AXES)), "best_validation"]);
  const columns = all.filter((column) => usual.has(column) !== changed.has(column));
  const key = `${columns.join()} ${[...flipped].join()}`;
  const axes = useMemo(
    () => columns.map((column) => axisOf(row, trials, column, flipped)),
    [trials, key],
  );
  const lines = useMemo((): Line[] => {
    const inside = new Set(kept.map((trial) => trial.id));
    return trials.map((trial) => ({
      trial: trial.id,
      cells: columns.map((column) => cell(trial, column)),
      color: color(trial),
      dash: by === "metric" ? [] : look(at.get(trial.id) ?? 0).dash,
      out: !inside.has(trial.id),
      words: words(row, trial, short),
    }));
  }, [trials, kept, key, by]);
  return (
    <figure class="chart large" aria-label="parallel coordinates">
      <figcaption>
        <span>parallel coordinates</span>
        <small class="muted">drag on an axis to filter</small>
        <Select name="color by" value={by} options={[["metric", `Color by ${metricOf(row)}`], ["trial", "Color by trial"]]} choose={setBy} />
      </figcaption>
      <details class="picker">
        <summary class="muted">{columns.length} of {all.length} axes</summary>
        <div class="choice">
          {all.map((column) => (
            <label key={column}>
              <input type="checkbox" checked={columns.includes(column)} onChange={() => change(column)} /> {titled(column, metricOf(row))}
            </label>
          ))}
        </div>
      </details>
      {columns.length < 2 ? (
        <p class="muted">Select at least two axes.</p>
      ) : (
        <Parallel
          title="parallel coordinates"
          axes={axes}
          heads={axes.map(({ column, title }) => (column.startsWith(PREFIX) && short.get(title)) || title)}
          lines={lines}
          brushes={axes.map((axis) => brushOf(axis, where))}
          brush={(axis, next) => setWhere([...without(where, axes[axis]!), ...keptBy(axes[axis]!, next)])}
          flip={(axis) => flip(columns[axis]!)}
          pick={go}
        />
      )}
    </figure>
  );
}

const BRUSHED = [">=", "<=", "in"];

const without = (where: Condition[], axis: Axis): Condition[] => where.filter(([column, sign]) => column !== axis.column || !BRUSHED.includes(sign));

/** The conditions that a brush selects. */
function keptBy(axis: Axis, brush: Brush | null): Condition[] {
  if (brush === null) return [];
  if (axis.kind === "category") {
    const count = axis.values.length;
    const [first, last] = [Math.floor(brush[0] * count + 0.01), Math.ceil(brush[1] * count - 0.01)];
    return [[axis.column, "in", axis.values.slice(first, Math.max(last, first + 1))]];
  }
  const ends: Condition[] = [[axis.column, ">=", axis.value(brush[0])], [axis.column, "<=", axis.value(brush[1])]];
  return ends.filter((_, at) => (at === 0 ? brush[0] > 0 : brush[1] < 1));
}

/** The part of an axis that conditions keep. */
function brushOf(axis: Axis, where: Condition[]): Brush | null {
  const mine = where.filter(([column, sign]) => column === axis.column && BRUSHED.includes(sign));
  if (mine.length === 0) return null;
  if (axis.kind === "category") {
    const wanted = mine.flatMap(([, sign, value]) => (sign === "in" ? (value as unknown[]) : []));
    const found = axis.values.map((value, at) => (wanted.includes(value) ? at : -1)).filter((at) => at >= 0);
    return found.length === 0 ? null : [found[0]! / axis.values.length, (found[found.length - 1]! + 1) / axis.values.length];
  }
  const end = (wanted: string, other: number) => {
    const found = mine.find(([, sign]) => sign === wanted);
    return found ? Math.min(1, Math.max(0, axis.place(found[2] as number) ?? other)) : other;
  };
  return [end(">=", 0), end("<=", 1)];
}

function Scatter(props: Parts) {
  const { row, trials, names, kept, short } = props;
  const [, , color] = useColors(props);
  const columns = [...names.map((name) => PREFIX + name), ...METRICS];
  const [xName, setX] = useChoice("x", columns[0]!);
  const [yName, setY] = useChoice("y", "best_validation");
  const [flipped, flip] = useSet("flip");
  const [x, y] = [xName, yName].map((name) => (columns.includes(name) ? name : columns[0]!)) as [string, string];
  const [left, up] = useMemo(
    () => [x, y].map((column) => axisOf(row, trials, column, flipped)) as [Axis, Axis],
    [trials, x, y, [...flipped].join()],
  );
  const dots = useMemo((): Dot[] => {
    const inside = new Set(kept.map((trial) => trial.id));
    return trials.map((trial) => ({
      trial: trial.id,
      x: spread(left, left.place(cell(trial, x)), trial.id),
      y: spread(up, up.place(cell(trial, y)), trial.id),
      color: color(trial),
      form: trial.state === "ERROR" ? "cross" : trial.state === "COMPLETED" ? "dot" : "ring",
      dim: !inside.has(trial.id),
      words: words(row, trial, short),
    }));
  }, [trials, kept, left, up, color]);
  const options = columns.map((column): [string, string] => [column, titled(column, metricOf(row))]);
  return (
    <figure class="chart large" aria-label="scatter">
      <figcaption>
        <span>scatter</span>
        <Select name="x axis" value={x} options={options} choose={setX} />
        <Select name="y axis" value={y} options={options} choose={setY} />
        {[left, up].map(
          (axis, at) =>
            axis.kind !== "category" && (
              <button type="button" key={at} onClick={() => flip(axis.column)}>
                {at === 0 ? "x" : "y"}: {axis.kind}
              </button>
            ),
        )}
        <small class="muted">dots: ended, rings: running, crosses: failed</small>
      </figcaption>
      <Dots title={`${titled(y, metricOf(row))} over ${titled(x, metricOf(row))}`} x={left} y={up} dots={dots} height={360} pick={go} />
    </figure>
  );
}

/** Trials of one category lie side by side, always in the same way. */
function spread(axis: Axis, place: number | null, id: number): number | null {
  if (place === null || axis.kind !== "category") return place;
  return place + ((((id * 7919) % 100) / 100 - 0.5) * 0.6) / axis.values.length;
}

function Importance({ row, tick }: Props) {
  const path = `/experiments/${row.id}/importance`;
  // Other trials' ends change it; while many run, not at every report.
  const found = useLoaded(path, () => get<Found>(path), Math.floor(tick / 10) + (row.ended_at === null ? 0 : 0.5));
  const answer = found.value;
  return (
    <figure class="chart large" aria-label="importance">
      <figcaption>
        <span>importance for {metricOf(row)}</span>
        {answer && answer.problem === null && <small class="muted">{number(answer.trials)} trials</small>}
      </figcaption>
      {found.error && <Problem text={found.error} />}
      {answer === null && !found.error && <p class="muted">Loading…</p>}
      {answer?.problem && <p class="muted">Not available yet: {answer.problem}.</p>}
      {answer && answer.problem === null && <Shares found={answer} />}
      {answer && (
        <details>
          <summary class="muted">method and limits</summary>
          <p class="description">{answer.method}</p>
        </details>
      )}
    </figure>
  );
}

const WEAK = 0.2;

function Shares({ found }: { found: Found }) {
  const explained = found.explained ?? 0;
  const percent = (part: number) => `${Math.round(100 * part)} %`;
  return (
    <>
      <p class={explained < WEAK ? "warn" : "muted"}>
        {explained < WEAK
          ? "No clear result: hyperparameters explain almost none of the differences between these trials. There may be too few trials, or too much noise."
          : `Hyperparameters explain about ${percent(explained)} of the differences between trials.`}
      </p>
      <table class="bars">
        <tbody>
          {found.shares.map(({ name, importance, spread: error }) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              <td class="bar-cell">
                <span style={{ width: `${Math.min(100, 100 * importance)}%` }} />
              </td>
              <td class="figure">
                {importance.toFixed(2)} <small class="muted">± {error.toFixed(2)}</small>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}
