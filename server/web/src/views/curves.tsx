/** The curves of some trials: one chart for each metric that they report. */

import { useMemo, useRef, useState } from "preact/hooks";

import { finite, get } from "../api";
import type { Experiment, Curve as Series, Trial } from "../resources";
import { Chart, type Curve } from "../chart";
import { useLoaded } from "../live";
import { ENDED, Problem } from "../parts";
import { address } from "../route";

const GROUPS = ["training", "validation", "system"];
const SHOWN: Record<string, string[]> = {
  "training and validation": ["training", "validation"],
  training: ["training"],
  validation: ["validation"],
  system: ["system"],
};
const MOST_TRIALS = 10;
const MOST_POINTS = 400; // about one a pixel
const COUNTERS = ["batches", "epochs", "loss_scale", "skipped_steps"];

interface Read {
  trial: number;
  series: Series[];
}

/** The trials that were chosen, else the best: those that were validated come before the others. */
function drawn(row: Experiment, trials: Trial[], chosen: Trial[]): Trial[] {
  if (chosen.length > 0 || trials.length <= MOST_TRIALS) return (chosen.length > 0 ? chosen : trials).slice(0, MOST_TRIALS);
  const sign = row.smaller_is_better ? 1 : -1;
  const rank = (t: Trial) => (finite(t.best_validation) ?? sign * Infinity) * sign;
  const best = [...trials].sort((a, b) => (rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : b.id - a.id));
  return best.slice(0, MOST_TRIALS).sort((a, b) => a.id - b.id);
}

/** Where a metric stands: the searcher's first, then losses, accuracies, others, counters. */
function place(name: string, metric: string): number {
  if (name === "loss") return 0;
  if (name === metric) return 1;
  if (name.endsWith("loss")) return 2;
  if (name.includes("accuracy")) return 3;
  return COUNTERS.includes(name) ? 5 : 4;
}

function charts(reads: Read[], metric: string, label: (trial: number, name: string) => string): [string, Curve[]][] {
  const found = new Map<string, Curve[]>();
  for (const { trial, series } of reads) {
    for (const one of series) {
      const key = `${one.group}: ${one.name}`;
      const curves = found.get(key) ?? [];
      curves.push({ label: label(trial, one.name), series: one });
      found.set(key, curves);
    }
  }
  const order = ([, curves]: [string, Curve[]]) => {
    const { group, name } = curves[0]!.series;
    return [place(name, metric), GROUPS.indexOf(group), name] as const;
  };
  return [...found].sort((a, b) => {
    const [x, y] = [order(a), order(b)];
    return x[0] - y[0] || x[1] - y[1] || x[2].localeCompare(y[2]);
  });
}

export function Curves(props: { row: Experiment; trials: Trial[]; chosen: Trial[]; tick: number }) {
  const { row, trials, chosen, tick } = props;
  const [shown, setShown] = useState("training and validation");
  const [log, setLog] = useState(false);
  const read = useReader();
  const some = drawn(row, trials, chosen);
  const ids = some.map((t) => t.id).join(",");
  // What is drawn stays while other trials are read, so that nothing flickers as trials come and go.
  const loaded = useLoaded(shown, () => Promise.all(some.map((trial) => read(trial, SHOWN[shown]!))), `${tick} ${ids}`);
  const found = useMemo(
    () => charts(loaded.value ?? [], row.metric, (trial, name) => (trials.length > 1 ? `trial ${trial}` : name)),
    [loaded.value],
  );
  const empty = loaded.value === null ? "Reading…" : ENDED.includes(row.state) ? "Nothing was reported." : "Nothing reported yet.";
  return (
    <section>
      {loaded.error && <Problem text={loaded.error} />}
      <div class="choice">
        {Object.keys(SHOWN).map((name) => (
          <button type="button" aria-pressed={shown === name} key={name} onClick={() => setShown(name)}>
            {name}
          </button>
        ))}
        <label title="Where all values are above zero">
          <input type="checkbox" checked={log} onChange={(e) => setLog(e.currentTarget.checked)} /> logarithmic
        </label>
        {trials.length > some.length && chosen.length === 0 && (
          <span class="muted">
            the best {some.length} of {trials.length} trials; <a href={address(row.id, "trials")}>choose others</a>
          </span>
        )}
        {chosen.length > some.length && <span class="muted">the first {some.length} of those chosen</span>}
      </div>
      {found.length === 0 && <p class="muted">{empty}</p>}
      <div class="charts">
        {found.map(([title, curves]) => (
          <Chart key={title} title={title} curves={curves} log={log} />
        ))}
      </div>
    </section>
  );
}

/** Reads the curves of a trial; those of one that has ended only once. */
function useReader(): (trial: Trial, groups: string[]) => Promise<Read> {
  const kept = useRef(new Map<string, Series[]>());
  return async (trial, groups) => {
    const parts = await Promise.all(
      groups.map(async (group) => {
        const key = `${trial.id} ${group} ${trial.state} ${trial.ended_at}`;
        const known = kept.current.get(key);
        if (known) return known;
        const path = `/trials/${trial.id}/metrics?group=${group}&max_points=${MOST_POINTS}`;
        const series = (await get<{ metrics: Series[] }>(path)).metrics;
        if (ENDED.includes(trial.state)) kept.current.set(key, series);
        return series;
      }),
    );
    return { trial: trial.id, series: parts.flat() };
  };
}
