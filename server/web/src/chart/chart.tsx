/** One metric of one or several trials as curves, with the min/max band where points were merged. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { number } from "../format";
import { useDark } from "../theme";
import { Now } from "../dialog";
import { type Along, axisName, formatPosition, type Timed, zoomTo } from "./along";
import { banded, type Curve, draw, type Drawing, type Style, type Zoom } from "./curve";
import type { Format } from "./download";
import { Nearest, nearest } from "./nearest";
import { options } from "./options";

const HEIGHT = 220;
const LARGE = 480;
const FORMATS: Format[] = ["PNG", "SVG", "CSV"];

export interface ChartProps {
  title: string;
  curves: Curve[];
  style: Style;
  /** Whether the axis of values leaves outliers beyond its edges. */
  tight: boolean;
  /** First and last batch that are shown; the same in all charts. */
  range: Zoom;
  zoom: (zoom: Zoom | null) => void;
  /** The trial that the mouse is nearest to, in any chart. */
  hot: number | null;
  heat: (trial: number | null) => void;
  large: boolean;
  enlarge: () => void;
  pinned: boolean;
  pin: () => void;
  along: Along;
  /** The range of values that was asked for; null for what there is. */
  fixed: [number, number] | null;
  fix: (range: [number, number] | null) => void;
}

const ICONS = {
  pin: "M8 1.8l1.9 4 4.3.5-3.2 3 .9 4.4L8 11.5l-3.9 2.2.9-4.4-3.2-3 4.3-.5z",
  download: "M8 2v8M4.5 7L8 10.5 11.5 7M2.5 13.5h11",
  range: "M8 2v12M5.5 4.5L8 2l2.5 2.5M5.5 11.5L8 14l2.5-2.5",
  enlarge: "M9.5 2.5h4v4M13.5 2.5L9 7M6.5 13.5h-4v-4M2.5 13.5L7 9",
  reduce: "M13 7H9V3M9 7l4.5-4.5M3 9h4v4M7 9l-4.5 4.5",
};

interface ToolProps {
  icon: keyof typeof ICONS;
  name: string;
  title: string;
  pressed?: boolean;
  expanded?: boolean;
  act: () => void;
}

/** A button of a chart. */
function Tool({ icon, name, title, pressed, expanded, act }: ToolProps) {
  return (
    <button type="button" class="bare" aria-pressed={pressed} aria-expanded={expanded} aria-label={name} title={title} onClick={act}>
      <svg viewBox="0 0 16 16" width="14" height="14" aria-hidden="true" fill={icon === "pin" && pressed ? "currentColor" : "none"} stroke="currentColor" stroke-width="1.5">
        <path d={ICONS[icon]} />
      </svg>
    </button>
  );
}

/** What a drawing shows, in words. */
function words(title: string, curves: Curve[], along: Along): string {
  const last = Math.max(...curves.map(({ series }) => series.points[series.points.length - 1]?.[0] ?? 0));
  const points = curves.reduce((sum, { series }) => sum + series.points.length, 0);
  const several = curves.length === 1 ? "" : `${curves.length} curves, `;
  return `${title}: ${several}${points} points to ${along === "batch" ? `batch ${last}` : formatPosition(last, along)}`;
}

export function Chart(props: ChartProps) {
  const { title, curves, range, hot, large, along, fixed } = props;
  const [open, setOpen] = useState<"" | "range" | "download">("");
  const toggle = (tool: "range" | "download") => setOpen(open === tool ? "" : tool);
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const { log, smooth } = props.style;
  const drawing = useMemo(() => draw(curves, props.style), [curves, log, smooth]);
  const now = useRef({ ...props, drawing, hovered: false });
  Object.assign(now.current, props, { drawing });
  const [at, setAt] = useState<(number | null)[] | null>(null);
  const dark = useDark();
  const height = large ? LARGE : HEIGHT;
  const figure = useRef<HTMLElement>(null);
  useEffect(() => {
    if (large) figure.current?.scrollIntoView({ block: "nearest" }); // it is the first of its group now
  }, [large]);
  const shape = [...curves.map((c) => `${c.trial} ${c.label} ${banded(c.series)}`), drawing.log, drawing.empty, props.tight, dark, height, along, fixed].join("|");

  useEffect(() => {
    const element = host.current!;
    const width = () => Math.max(200, element.clientWidth);
    const moved = (moving: uPlot) => {
      const outside = (moving.cursor.left ?? -1) < 0;
      setAt(outside ? null : [...(moving.cursor.idxs ?? [])]);
      if (!now.current.hovered || now.current.curves.length < 2) return;
      const [found] = outside ? [] : nearest(moving, now.current.curves, now.current.drawing, 1);
      now.current.heat(found?.curve.trial ?? null);
    };
    const tight = props.tight ? drawing.columns : null;
    const wishes = { log: drawing.log, empty: drawing.empty, tight, fixed, along, height, width: width(), style: getComputedStyle(element), moved };
    const marked = () => now.current.drawing.broken;
    const made = new uPlot(options(curves, { ...wishes, marked, zoom: (zoom) => now.current.zoom(zoom) }), drawing.data, element);
    plot.current = made;
    show(made, drawing, range);
    const watcher = new ResizeObserver(() => made.setSize({ width: width(), height }));
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    if (plot.current) show(plot.current, drawing, range);
  }, [drawing, range[0], range[1]]);

  useEffect(() => {
    const index = curves.findIndex((curve) => curve.trial === hot);
    if (curves.length > 1) plot.current?.setSeries(index < 0 ? null : drawing.columns[index]!, { focus: true });
  }, [hot, drawing]);

  const hovering = (hovered: boolean) => {
    now.current.hovered = hovered;
    if (!hovered) props.heat(null);
  };
  const key = (event: KeyboardEvent) => plot.current && steer(event, plot.current, { ...props, drawing, hot });
  return (
    <figure ref={figure} class={large ? "chart large" : "chart"} aria-label={words(title, curves, along)}>
      <figcaption>
        <span>{title}</span> <Notes {...props} drawing={drawing} />
        {curves.length === 1 && <output>{number(curves[0]!.series.points.at(-1)?.[1])}</output>}
        <span class="tools">
          <Tool icon="pin" name={`pin ${title}`} title={props.pinned ? "Unpin" : "Pin: show first"} pressed={props.pinned} act={props.pin} />
          <Tool icon="download" name={`download ${title}`} title="Download" expanded={open === "download"} act={() => toggle("download")} />
          <Tool icon="range" name={`range of values of ${title}`} title="Range of values" expanded={open === "range"} act={() => toggle("range")} />
          <Tool icon={large ? "reduce" : "enlarge"} name={`enlarge ${title}`} title={large ? "Reduce" : "Enlarge"} pressed={large} act={props.enlarge} />
        </span>
      </figcaption>
      {open === "download" && (
        <div class="choice">
          {FORMATS.map((format) => (
            <Now key={format} act={async () => plot.current && (await import("./download")).download({ title, curves, drawing, along, plot: plot.current }, format)}>
              {format}
            </Now>
          ))}
        </div>
      )}
      {(open === "range" || fixed) && <Range title={title} fixed={fixed} fix={props.fix} now={plot.current?.scales.y} />}
      <div class="drawing">
        <div
          ref={host}
          tabIndex={0}
          role="application"
          aria-label={`curves of ${title}: left and right move along, up and down select a curve, + and - zoom, Escape resets`}
          onMouseEnter={() => hovering(true)}
          onMouseLeave={() => hovering(false)}
          onKeyDown={key}
          onBlur={() => setAt(null)}
        />
        {at && plot.current && now.current.hovered && curves.length > 1 && <Nearest plot={plot.current} curves={curves} drawing={drawing} hot={hot} />}
      </div>
      <Readout plot={plot.current} at={at} curves={curves} hot={hot} drawing={drawing} along={along} />
    </figure>
  );
}

interface Steered extends ChartProps {
  drawing: Drawing;
}

/** What a key does in a chart. */
function steer(event: KeyboardEvent, plot: uPlot, { curves, drawing, hot, heat, range, zoom, along: axis }: Steered): void {
  const along = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const other = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const closer = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
  const curve = Math.max(0, curves.findIndex((one) => one.trial === hot));
  if (along) {
    if (curves.length > 1 && hot === null) heat(curves[curve]!.trial);
    move(plot, drawing.columns[curve]!, along * (event.shiftKey ? 10 : 1));
  } else if (other && curves.length > 1) {
    heat(curves[(hot === null ? 0 : curve + other + curves.length) % curves.length]!.trial);
  } else if (closer) {
    const middle = plot.cursor.left != null && plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : (range[0] + range[1]) / 2;
    const half = (closer * (range[1] - range[0])) / 2;
    zoom(zoomTo(middle - half, middle + half, axis));
  } else if (event.key === "Escape") zoom(null);
  else return;
  event.preventDefault();
}

/** Put the cursor on the next points of a column that are in sight. */
function move(plot: uPlot, column: number, by: number): void {
  const [places, values] = [plot.data[0], plot.data[column]!];
  const { min = -Infinity, max = Infinity } = plot.scales.x!;
  const rows = [...places.keys()].filter((row) => values[row] != null && places[row]! >= min && places[row]! <= max);
  if (rows.length === 0) return;
  const now = plot.cursor.idxs?.[column] ?? null;
  const outside = now === null || (plot.cursor.left ?? -1) < 0;
  const at = outside ? (by > 0 ? -by : rows.length - 1 - by) : rows.findIndex((row) => row >= now);
  const row = rows[Math.min(rows.length - 1, Math.max(0, at + by))]!;
  plot.setCursor({ left: plot.valToPos(places[row]!, "x"), top: plot.valToPos(values[row]!, "y") });
}

interface RangeProps {
  title: string;
  fixed: [number, number] | null;
  fix: (range: [number, number] | null) => void;
  now: uPlot.Scale | undefined;
}

/** From where to where the axis of values goes. */
function Range({ title, fixed, fix, now }: RangeProps) {
  const shown = (value: number | undefined) => (value === undefined ? "" : String(Number(value.toPrecision(4))));
  const [low, setLow] = useState(shown(fixed?.[0] ?? now?.min ?? undefined));
  const [high, setHigh] = useState(shown(fixed?.[1] ?? now?.max ?? undefined));
  const wrong = low.trim() === "" || high.trim() === "" || !(Number(low) < Number(high));
  const submit = (event: Event) => {
    event.preventDefault();
    if (!wrong) fix([Number(low), Number(high)]);
  };
  return (
    <form class="choice" onSubmit={submit}>
      <label>
        from <input aria-label={`minimum of ${title}`} inputMode="decimal" size={8} value={low} onInput={(e) => setLow(e.currentTarget.value)} />
      </label>
      <label>
        to <input aria-label={`maximum of ${title}`} inputMode="decimal" size={8} value={high} onInput={(e) => setHigh(e.currentTarget.value)} />
      </label>
      <button type="submit" disabled={wrong}>
        Apply
      </button>
      {fixed && (
        <button type="button" onClick={() => fix(null)}>
          Auto
        </button>
      )}
      {wrong && <small class="warn">minimum must be less than maximum</small>}
    </form>
  );
}

/** Draw data, from the first to the last batch that is looked at. */
function show(plot: uPlot, drawing: Drawing, [min, max]: Zoom): void {
  plot.batch(() => {
    plot.setData(drawing.data, false);
    plot.setScale("x", { min, max });
  });
}

/** What the drawing cannot show. */
function Notes({ drawing, along, style: { log } }: ChartProps & { drawing: Drawing }) {
  const [first] = drawing.broken;
  return (
    <>
      {first && (
        <small class="warn">
          {number(drawing.lost)} NaN or infinite, {first.stays ? "from" : "first at"} {formatPosition(first.at, along)}
        </small>
      )}
      {log && !drawing.log && <small class="warn">linear: no values above 0</small>}
      {drawing.log && drawing.below > 0 && <small class="warn">{number(drawing.below)} values ≤ 0 not shown</small>}
      {drawing.log && drawing.cut && <small class="muted">bands clipped</small>}
    </>
  );
}

interface Reading {
  plot: uPlot | null;
  /** The row of each column that is nearest to the mouse. */
  at: (number | null)[] | null;
  curves: Curve[];
  hot: number | null;
  drawing: Drawing;
  along: Along;
}

/** The value under the mouse: of the only curve, or of the nearest one. */
function Readout({ plot, at, curves, hot, drawing, along }: Reading) {
  const index = curves.length === 1 ? 0 : curves.findIndex((curve) => curve.trial === hot);
  const column = drawing.columns[index];
  const row = column === undefined ? null : at?.[column];
  const drawn = plot && row != null ? plot.data[column!]?.[row] : null;
  if (row == null || drawn == null) return <p class="readout axis">{axisName(along)}</p>;
  const curve = curves[index]!;
  const step = plot!.data[0]![row]!;
  const point = curve.series.points.findIndex((one) => one[0] === step);
  const value = curve.series.points[point]?.[1]; // not the smoothed one
  const batch = (curve.series as Timed).steps?.[point];
  const band = curve.series.band?.find((one) => one[0] === step);
  return (
    <p class="readout" aria-live="polite">
      <b>{number(value)}</b>
      {band && band[1] !== band[2] && ` (${number(band[1])} to ${number(band[2])})`}
      {" · "}
      {formatPosition(step, along)}
      {batch !== undefined && ` · batch ${number(batch)}`}
      {curves.length > 1 && (
        <>
          {" · "}
          <i style={{ color: curve.look.color }}>{curve.label}</i>
        </>
      )}
    </p>
  );
}
