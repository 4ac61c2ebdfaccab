/** The curves of some trials, of one experiment or of several: a chart for each metric that they report. */

import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";

import { number } from "../format";
import { useLoaded } from "../live";
import { Problem, Select } from "../parts";
import { useChoice } from "../route";
import { ALONG, type Along, formatPosition } from "./along";
import { Chart } from "./chart";
import { type Curve, extent, type Style, type Zoom } from "./curve";
import { charts, counter, type Line, type Titled, useReader } from "./drawn";
import { look } from "./looks";
import { single, Values } from "./values";

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
/** Charts that are drawn before more are asked for. */
const MOST_CHARTS = 12;
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
  const [wish, setWish] = useChoice("along", "batch");
  const along = (ALONG.some(([name]) => name === wish) ? wish : "batch") as Along;
  const [part, setPart] = useChoice(along === "batch" ? "batches" : along);
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
        <Select name="x axis" value={along} options={ALONG} choose={setWish} />
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
        <Charts
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

/** The part of `120-480`; null where that is none. */
function zoomed(part: string): Zoom | null {
  const found = /^(\d{1,15})-(\d{1,15})$/.exec(part);
  const [first, last] = [Number(found?.[1]), Number(found?.[2])];
  return found && first < last ? [first, last] : null;
}

function Empty({ ended, reading }: { ended: boolean; reading: boolean }) {
  if (reading) return <p class="muted">Loading…</p>;
  return <p class="muted">{ended ? "No metrics." : "No metrics yet."}</p>;
}

interface Drawn {
  found: Titled[];
  zoom: Zoom | null;
  setZoom: (zoom: Zoom | null) => void;
  style: Style;
  tight: boolean;
  lines: Line[];
  several: boolean;
  along: Along;
}

type Ranges = Record<string, [number, number]>;

/** The ranges of values that the address tells, by the titles of their charts. */
function ranges(text: string): Ranges {
  try {
    const found = Object.entries(JSON.parse(text || "{}") as Record<string, unknown>);
    const good = (pair: unknown) => Array.isArray(pair) && pair.length === 2 && pair.every(Number.isFinite) && pair[0] < pair[1];
    return Object.fromEntries(found.filter(([, pair]) => good(pair))) as Ranges;
  } catch {
    return {};
  }
}

function Charts({ found, zoom, setZoom, style, tight, lines, several, along }: Drawn) {
  const [texts, setTexts] = useChoice("range");
  const fixed = ranges(texts);
  const fix = (title: string, range: [number, number] | null) => {
    const { [title]: _, ...others } = fixed;
    const next = range === null ? others : { ...others, [title]: range };
    setTexts(Object.keys(next).length === 0 ? "" : JSON.stringify(next));
  };
  const [large, setLarge] = useChoice("large");
  const [open, setOpen] = useChoice("counters");
  const [hot, setHot] = useState<number | null>(null);
  const [most, setMost] = useState(MOST_CHARTS);
  const counters = found.filter(counter);
  const [values, main] = [true, false].map((once) => found.filter((one) => !counter(one) && single(one) === once)) as [Titled[], Titled[]];
  const range = zoom ?? extent(found.flatMap(([, curves]) => curves));
  const grid = (titled: Titled[]) => (
    <div class="charts">
      {titled.map(([title, curves]) => (
        <Chart
          key={title}
          title={title}
          curves={curves}
          style={style}
          tight={tight}
          range={range}
          zoom={setZoom}
          hot={hot}
          heat={setHot}
          large={large === title}
          along={along}
          fixed={fixed[title] ?? null}
          fix={(range) => fix(title, range)}
          enlarge={() => setLarge(large === title ? "" : title)}
        />
      ))}
    </div>
  );
  return (
    <>
      {several && <Legend lines={lines} hot={hot} heat={setHot} />}
      {found.length === 0 && <p class="muted">No matches.</p>}
      {grid(main.slice(0, most))}
      {main.length > most && (
        <p>
          <button type="button" onClick={() => setMost(main.length)}>
            {main.length - most} more charts
          </button>
        </p>
      )}
      <Values found={values} lines={lines} several={several} along={along} />
      {counters.length > 0 && (
        <details class="counters" open={open !== ""} onToggle={(e) => setOpen(e.currentTarget.open ? "1" : "")}>
          <summary>
            counters <span class="muted">{counters.map(latest).join(" · ")}</span>
          </summary>
          {open !== "" && grid(counters)}
        </details>
      )}
    </>
  );
}

/** The last value of a metric; of several curves, the least and the greatest. */
function latest([title, curves]: [string, Curve[]]): string {
  const last = curves.map(({ series }) => series.points.at(-1)?.[1]).filter((value) => typeof value === "number");
  const [least, most] = [Math.min(...last), Math.max(...last)];
  return `${title} ${number(least)}${most > least ? ` to ${number(most)}` : ""}`;
}

interface LegendProps {
  lines: Line[];
  hot: number | null;
  heat: (trial: number | null) => void;
}

/** Which curve is whose, once for all charts. */
function Legend({ lines, hot, heat }: LegendProps) {
  return (
    <ul class="legend" aria-label="trials" onMouseLeave={() => heat(null)}>
      {lines.map(({ trial: { id }, name, detail, look: { color, dash }, best, href }) => (
        <li key={id} class={hot === id ? "hot" : ""} onMouseEnter={() => heat(id)}>
          <svg width="22" height="8" aria-hidden="true">
            <line x1="0" y1="4" x2="22" y2="4" stroke={color} stroke-width="2.5" stroke-dasharray={dash.join(" ")} />
          </svg>
          <a href={href} onFocus={() => heat(id)} onBlur={() => heat(null)}>
            {name}
          </a>{" "}
          <span class="muted">{detail}</span>
          {best && <small class="label">best</small>}
        </li>
      ))}
    </ul>
  );
}
