/** The curves of some trials: one chart for each metric that they report. */

import { useMemo, useState } from "preact/hooks";

import { get, type MetricName, type Series, type Trial } from "../api";
import { Chart, type Curve } from "../chart";
import { useLoaded } from "../live";
import { Problem } from "../parts";

const GROUPS = ["training", "validation", "system"];
const MOST_TRIALS = 20;

interface Read {
  trial: Trial;
  series: Series[];
}

async function read(trials: Trial[], group: string): Promise<Read[]> {
  return Promise.all(
    trials.slice(0, MOST_TRIALS).map(async (trial) => {
      const names = await get<{ names?: MetricName[]; metric_names?: MetricName[] }>(`/trials/${trial.id}/metric-names`);
      const known = (names.names ?? names.metric_names ?? []).some((n) => n.group === group);
      if (!known) return { trial, series: [] };
      const found = await get<{ metrics: Series[] }>(`/trials/${trial.id}/metrics?group=${group}&max_points=1000`);
      return { trial, series: found.metrics.filter((s) => s.group === group) };
    }),
  );
}

/** `loss` and what ends in it first, then by name. */
function order(a: string, b: string): number {
  const rank = (name: string) => (name === "loss" ? 0 : name.endsWith("loss") ? 1 : name.includes("accuracy") ? 2 : 3);
  return rank(a) - rank(b) || a.localeCompare(b);
}

export function Curves({ trials, tick }: { trials: Trial[]; tick: number }) {
  const [group, setGroup] = useState<string | null>(null);
  const ids = trials.map((t) => t.id).join(",");
  const both = group === null ? ["training", "validation"] : [group];
  const loaded = useLoaded(`curves ${ids} ${group ?? ""}`, () => Promise.all(both.map((g) => read(trials, g))));
  const [seen, setSeen] = useState(tick);
  if (seen !== tick) {
    setSeen(tick);
    loaded.reload();
  }
  const charts = useMemo(() => {
    const found = new Map<string, Curve[]>();
    for (const one of loaded.value ?? []) {
      for (const { trial, series } of one) {
        for (const s of series) {
          const key = `${s.group} ${s.name}`;
          found.set(key, [...(found.get(key) ?? []), { label: trials.length > 1 ? `trial ${trial.id}` : s.name, series: s }]);
        }
      }
    }
    return [...found].sort(([a], [b]) => {
      const [groupA, nameA] = a.split(" ") as [string, string];
      const [groupB, nameB] = b.split(" ") as [string, string];
      return order(nameA, nameB) || GROUPS.indexOf(groupA) - GROUPS.indexOf(groupB);
    });
  }, [loaded.value]);
  if (loaded.error) return <Problem text={loaded.error} />;
  return (
    <section>
      <div class="choice">
        {[null, ...GROUPS].map((g) => (
          <button type="button" aria-pressed={group === g} key={g ?? "both"} onClick={() => setGroup(g)}>
            {g ?? "training and validation"}
          </button>
        ))}
        {trials.length > MOST_TRIALS && <span class="muted">the first {MOST_TRIALS} trials are drawn</span>}
      </div>
      {charts.length === 0 && <p class="muted">{loaded.value === null ? "Reading…" : "Nothing reported yet."}</p>}
      <div class="charts">
        {charts.map(([title, curves]) => (
          <Chart key={title} title={title.replace(" ", ": ")} curves={curves} />
        ))}
      </div>
    </section>
  );
}
