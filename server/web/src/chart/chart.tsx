/** One metric of one or several trials as curves, with the min/max band where points were merged. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { number } from "../format";
import { banded, type Curve, draw, type Drawing, type Style, type Zoom } from "./curve";
import { options } from "./options";

const HEIGHT = 220;
const LARGE = 480;

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
}

/** What a drawing shows, in words. */
function words(title: string, curves: Curve[]): string {
  const last = Math.max(...curves.map(({ series }) => series.points[series.points.length - 1]?.[0] ?? 0));
  const points = curves.reduce((sum, { series }) => sum + series.points.length, 0);
  const several = curves.length === 1 ? "" : `${curves.length} curves, `;
  return `${title}: ${several}${points} points to batch ${last}`;
}

/** Whether the system asks for a dark page; changes redraw. */
function useDark(): boolean {
  const [dark, setDark] = useState(() => window.matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => {
    const media = window.matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setDark(media.matches);
    media.addEventListener("change", changed);
    return () => media.removeEventListener("change", changed);
  }, []);
  return dark;
}

function nearest(plot: uPlot, { columns }: Drawing): number | null {
  let [found, least] = [null as number | null, Infinity];
  columns.forEach((column, curve) => {
    const value = plot.data[column]?.[plot.cursor.idxs?.[column] ?? -1];
    if (value == null) return;
    const distance = Math.abs(plot.valToPos(value, "y") - (plot.cursor.top ?? 0));
    if (distance < least) [found, least] = [curve, distance];
  });
  return found;
}

export function Chart(props: ChartProps) {
  const { title, curves, range, hot, large } = props;
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const { log, smooth } = props.style;
  const drawing = useMemo(() => draw(curves, props.style), [curves, log, smooth]);
  const now = useRef({ ...props, drawing, hovered: false });
  Object.assign(now.current, props, { drawing });
  const [at, setAt] = useState<(number | null)[] | null>(null);
  const dark = useDark();
  const height = large ? LARGE : HEIGHT;
  const shape = [...curves.map((c) => `${c.trial} ${c.label} ${banded(c.series)}`), drawing.log, props.tight, dark, height].join("|");

  useEffect(() => {
    const element = host.current!;
    const width = () => Math.max(200, element.clientWidth);
    const moved = (moving: uPlot) => {
      const outside = (moving.cursor.left ?? -1) < 0;
      setAt(outside ? null : [...(moving.cursor.idxs ?? [])]);
      if (!now.current.hovered || now.current.curves.length < 2) return;
      const index = outside ? null : nearest(moving, now.current.drawing);
      now.current.heat(index === null ? null : now.current.curves[index]!.trial);
    };
    const tight = props.tight ? drawing.columns : null;
    const wishes = { log: drawing.log, tight, height, width: width(), style: getComputedStyle(element), moved };
    const made = new uPlot(options(curves, { ...wishes, zoom: (zoom) => now.current.zoom(zoom) }), drawing.data, element);
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
  return (
    <figure class={large ? "chart large" : "chart"} aria-label={words(title, curves)}>
      <figcaption>
        <span>{title}</span> <Notes {...props} drawing={drawing} />
        {curves.length === 1 && <output>{number(curves[0]!.series.points.at(-1)?.[1])}</output>}
        <button type="button" class="bare" aria-pressed={large} aria-label={`enlarge ${title}`} onClick={props.enlarge}>
          {large ? "−" : "+"}
        </button>
      </figcaption>
      <div ref={host} onMouseEnter={() => hovering(true)} onMouseLeave={() => hovering(false)} />
      <Readout plot={plot.current} at={at} curves={curves} hot={hot} drawing={drawing} />
    </figure>
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
function Notes({ drawing, style: { log } }: ChartProps & { drawing: Drawing }) {
  return (
    <>
      {drawing.lost > 0 && <small class="warn">{number(drawing.lost)} not finite</small>}
      {log && !drawing.log && <small class="warn">linear: nothing is above 0</small>}
      {drawing.log && drawing.below > 0 && <small class="warn">{number(drawing.below)} ≤ 0 not drawn</small>}
      {drawing.log && drawing.cut && <small class="muted">bands cut</small>}
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
}

/** The values under the mouse: of the only curve, or of the one that is nearest. */
function Readout({ plot, at, curves, hot, drawing }: Reading) {
  const index = curves.length === 1 ? 0 : curves.findIndex((curve) => curve.trial === hot);
  const column = drawing.columns[index];
  const row = column === undefined ? null : at?.[column];
  const drawn = plot && row != null ? plot.data[column!]?.[row] : null;
  if (row == null || drawn == null) return <p class="readout axis">batch</p>;
  const curve = curves[index]!;
  const step = plot!.data[0]![row]!;
  const value = curve.series.points.find((point) => point[0] === step)?.[1]; // not the smoothed one
  const band = curve.series.band?.find((one) => one[0] === step);
  return (
    <p class="readout">
      batch {number(step)}
      {curves.length > 1 && (
        <>
          {" · "}
          <i style={{ color: curve.look.color }}>{curve.label}</i>
        </>
      )}
      {" · "}
      <b>{number(value)}</b>
      {band && band[1] !== band[2] && ` (${number(band[1])} to ${number(band[2])})`}
    </p>
  );
}
