/** The curves of some trials, of one experiment or of several: a chart for each metric that they report. */

import type { ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";

import { number } from "../format";
import { useLoaded } from "../live";
import { Problem, Select } from "../parts";
import { choose, useChoice } from "../route";
import { type Along, ALONG, axesOf, formatPosition, isMetric } from "./along";
import type { Zoom } from "./curve";
import { charts, type Line, useReader } from "./drawn";
import { Grid } from "./grid";
import { look } from "./looks";

const SHOWN: Record<string, string[]> = {
  "training and validation": ["training", "validation"],
  training: ["training"],
  validation: ["validation"],
  system: ["system"],
};
const USUAL = "training and validation";
const SMOOTH: [string, string][] = [
  ["", "No smoothing"],
  ...["0.6", "0.9", "0.97", "0.99"].map((part): [string, string] => [part, `Smoothing ${part}`]),
];
/** Charts that need no search. */
const FEW = 6;

interface BoardProps {
  lines: Line[];
  /** Whether curves are named by their trials; else by their metrics. */
  several: boolean;
  /** By which trials are compared: drawn first. */
  metrics: string[];
  /** Whether nothing more is to come. */
  ended: boolean;
  tick: number | string;
  note?: ComponentChildren;
}

/** A chart for each metric of some trials, and what can be chosen about all charts. */
export function Board({ lines, several, metrics, ended, tick, note }: BoardProps) {
  const [wanted, setShown] = useChoice("group", USUAL);
  const shown = wanted in SHOWN ? wanted : USUAL;
  const [log, setLog] = useChoice("log");
  const [smooth, setSmooth] = useChoice("smooth");
  const [tight, setTight] = useChoice("tight");
  const [find, setFind] = useChoice("metric");
  const [wish] = useChoice("along", "batch");
  const along = (isMetric(wish) || ALONG.some(([name]) => name === wish) ? wish : "batch") as Along;
  const partName = along === "batch" ? "batches" : isMetric(along) ? "part" : along;
  const [part, setPart] = useChoice(partName);
  const zoom = zoomed(part);
  const read = useReader(lines.length, along);
  const ids = lines.map(({ trial }) => trial.id).join(",");
  // What is drawn stays while other trials are read, so that nothing flickers as trials come and go.
  const load = () => Promise.all(lines.map(({ trial }) => read(trial, SHOWN[shown]!, along === "batch" ? zoom : null)));
  const loaded = useLoaded(`${shown} ${along}`, load, `${tick} ${ids} ${part}`);
  const found = useMemo(() => {
    const known = new Map(lines.map((line) => [line.trial.id, line]));
    return charts(loaded.value ?? [], metrics, (trial, metric) => {
      const line = known.get(trial);
      const label = several && line ? `${line.name}${within(line.detail)}` : metric;
      return { label, look: line?.look ?? look(0) };
    });
  }, [loaded.value, several]);
  const titles = useMemo(() => [...new Set((loaded.value ?? []).flatMap((read) => read.titles))], [loaded.value]);
  const setZoom = (next: Zoom | null) => setPart(next === null ? "" : next.join("-"));
  return (
    <section>
      {loaded.error && <Problem text={loaded.error} />}
      <div class="choice">
        {Object.keys(SHOWN).map((name) => (
          <button type="button" aria-pressed={shown === name} key={name} onClick={() => setShown(name)}>
            {name}
          </button>
        ))}
        <label>
          <input type="checkbox" checked={log !== ""} onChange={(e) => setLog(e.currentTarget.checked ? "1" : "")} /> Log scale
        </label>
        <label title="Clip outliers (1st to 99th percentile)">
          <input type="checkbox" checked={tight !== ""} onChange={(e) => setTight(e.currentTarget.checked ? "1" : "")} /> Ignore
          outliers
        </label>
        <Select name="x axis" value={along} options={axesOf(titles, along)} choose={(next) => choose({ along: next === "batch" ? null : next, part: null })} />
        <Select name="smoothing" value={smooth} options={SMOOTH} choose={setSmooth} />
        {(found.length > FEW || find !== "") && (
          <input
            type="search"
            placeholder="Metric name"
            aria-label="search metrics"
            value={find}
            onInput={(e) => setFind(e.currentTarget.value)}
          />
        )}
        {zoom === null ? (
          found.length > 0 && <span class="muted wide-only">drag in a chart to zoom</span>
        ) : (
          <button type="button" class="reset" onClick={() => setZoom(null)}>
            {along === "batch" ? `batches ${number(zoom[0])} to ${number(zoom[1])}` : `${formatPosition(zoom[0], along)} to ${formatPosition(zoom[1], along)}`} ✕ <span class="muted">reset zoom</span>
          </button>
        )}
        {note}
      </div>
      {found.length === 0 ? (
        <Empty ended={ended} reading={loaded.value === null} />
      ) : (
        <Grid
          found={found.filter(([title]) => title.toLowerCase().includes(find.toLowerCase()))}
          zoom={zoom}
          setZoom={setZoom}
          style={{ log: log !== "", smooth: weight(smooth) }}
          tight={tight !== ""}
          lines={lines}
          several={several}
          along={along}
        />
      )}
    </section>
  );
}

const within = (text: string | undefined): string => (text ? ` (${text})` : "");

/** The weight of `0.9`; none where that is no weight. */
const weight = (text: string): number => (Number(text) > 0 && Number(text) < 1 ? Number(text) : 0);

const END = String.raw`(-?\d[\d.]{0,20}(?:e[-+]?\d{1,3})?)`;
const PART = new RegExp(`^${END}-${END}$`);

/** The part of `120-480`; null where that is none. */
function zoomed(part: string): Zoom | null {
  const found = PART.exec(part);
  const [first, last] = [Number(found?.[1]), Number(found?.[2])];
  return found && first < last ? [first, last] : null;
}

function Empty({ ended, reading }: { ended: boolean; reading: boolean }) {
  if (reading) return <p class="muted">Loading…</p>;
  return <p class="muted">{ended ? "No metrics." : "No metrics yet."}</p>;
}
