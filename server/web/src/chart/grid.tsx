/** The charts of some trials: pinned ones first, metrics with a common prefix together. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";

import { number } from "../format";
import { useChoice } from "../route";
import type { Along } from "./along";
import { Chart } from "./chart";
import { type Curve, extent, type Style, type Zoom } from "./curve";
import { counter, type Line, type Titled } from "./drawn";
import { single, Values } from "./values";

/** Charts that are drawn before more are asked for. */
const MOST_CHARTS = 12;

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

export function Grid({ found, zoom, setZoom, style, tight, lines, several, along }: Drawn) {
  const [texts, setTexts] = useChoice("range");
  const fixed = ranges(texts);
  const fix = (title: string, range: [number, number] | null) => {
    const { [title]: _, ...others } = fixed;
    const next = range === null ? others : { ...others, [title]: range };
    setTexts(Object.keys(next).length === 0 ? "" : JSON.stringify(next));
  };
  const [large, setLarge] = useChoice("large");
  const [pins, setPins] = useChoice("pinned");
  const pinned = names(pins);
  const pin = (title: string) => {
    const next = pinned.includes(title) ? pinned.filter((one) => one !== title) : [...pinned, title];
    setPins(next.length === 0 ? "" : JSON.stringify(next));
  };
  const [open, setOpen] = useChoice("counters");
  const [hot, setHot] = useState<number | null>(null);
  const counters = found.filter(counter);
  const [values, main] = [true, false].map((once) => found.filter((one) => !counter(one) && single(one) === once)) as [Titled[], Titled[]];
  const first = pinned.flatMap((title) => main.filter((one) => one[0] === title));
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
          pinned={pinned.includes(title)}
          pin={() => pin(title)}
        />
      ))}
    </div>
  );
  return (
    <>
      {several && <Legend lines={lines} hot={hot} heat={setHot} />}
      {found.length === 0 && <p class="muted">No matches.</p>}
      {first.length > 0 && grid(first)}
      <Groups charts={main.filter(([title]) => !pinned.includes(title))} grid={grid} />
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

/** The titles of a list in the address; none where it cannot be read. */
function names(text: string): string[] {
  try {
    const found: unknown = JSON.parse(text || "[]");
    return Array.isArray(found) ? found.filter((one): one is string => typeof one === "string") : [];
  } catch {
    return [];
  }
}

/** The part of a metric's name before its first slash: `optimizer` of `training: optimizer/lr`. */
function prefixOf([title]: Titled): string {
  const name = title.slice(title.indexOf(": ") + 2);
  return name.includes("/") ? name.slice(0, name.indexOf("/")) : "";
}

interface GroupsProps {
  charts: Titled[];
  grid: (charts: Titled[]) => ComponentChildren;
}

/** Charts in a section for each prefix; metrics without a prefix come first. */
function Groups({ charts, grid }: GroupsProps) {
  const [most, setMost] = useState(MOST_CHARTS);
  const groups = new Map<string, Titled[]>([["", []]]);
  for (const one of charts) groups.set(prefixOf(one), [...(groups.get(prefixOf(one)) ?? []), one]);
  let drawn = 0;
  return (
    <>
      {[...groups].map(([prefix, members]) => {
        const open = drawn < MOST_CHARTS;
        drawn += members.length;
        if (prefix !== "") return <Group key={prefix} prefix={prefix} members={members} open={open} grid={grid} />;
        return (
          <div key="">
            {grid(members.slice(0, most))}
            {members.length > most && (
              <p>
                <button type="button" onClick={() => setMost(members.length)}>
                  {members.length - most} more charts
                </button>
              </p>
            )}
          </div>
        );
      })}
    </>
  );
}

interface GroupProps {
  prefix: string;
  members: Titled[];
  /** Whether it is open before the first click. */
  open: boolean;
  grid: (charts: Titled[]) => ComponentChildren;
}

/** A closed section draws no charts. */
function Group({ prefix, members, open: usual, grid }: GroupProps) {
  const [changed, setChanged] = useState<boolean | null>(null);
  const open = changed ?? usual;
  return (
    <details class="group" open={open} onToggle={(e) => e.currentTarget.open !== open && setChanged(e.currentTarget.open)}>
      <summary>
        {prefix}/ <span class="muted">{members.length === 1 ? "1 chart" : `${number(members.length)} charts`}</span>
      </summary>
      {open && grid(members)}
    </details>
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
