/** One metric of one or several trials as curves, with the min/max band where points were merged. */

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { finite } from "./api";
import type { Num, Curve as Series } from "./resources";
import { number, tick } from "./format";

export interface Curve {
  label: string;
  series: Series;
}

const COLORS = ["#2f6fed", "#e8590c", "#2b8a3e", "#ae3ec9", "#e03131", "#1098ad", "#b08900", "#7048e8", "#d6336c", "#74b816"];
const HEIGHT = 210;
const FEW_POINTS = 30;

const banded = (series: Series): boolean => Boolean(series.band?.length);

/** Merge curves onto one axis of steps; lines go on across what is missing or not finite. */
function table(curves: Curve[]): uPlot.AlignedData {
  const columns = curves.flatMap(({ series }): uPlot.AlignedData[] => {
    const pair = (rows: Num[][], column: number): uPlot.AlignedData => [
      rows.map((row) => row[0] as number),
      rows.map((row) => finite(row[column])),
    ];
    if (!banded(series)) return [pair(series.points, 1)];
    const band = series.band!;
    return [pair(band, 3), pair(band, 2), pair(band, 1)];
  });
  return columns.length === 0 ? [[]] : uPlot.join(columns);
}

/** Values that have no place in a drawing: NaN and infinities. */
function lost(curves: Curve[]): number {
  return curves.reduce((sum, { series }) => sum + series.points.filter((point) => finite(point[1]) === null).length, 0);
}

/** What a drawing shows, in words. */
function words(title: string, curves: Curve[]): string {
  const last = Math.max(...curves.map(({ series }) => series.points[series.points.length - 1]?.[0] ?? 0));
  const points = curves.reduce((sum, { series }) => sum + series.points.length, 0);
  const several = curves.length === 1 ? "" : `${curves.length} curves, `;
  return `${title}: ${several}${points} points to batch ${last}`;
}

function positive(curves: Curve[]): boolean {
  const low = curves.flatMap(({ series }) => (banded(series) ? series.band!.map((b) => b[1]) : series.points.map((p) => p[1])));
  return low.every((value) => (finite(value) ?? 1) > 0);
}

/** The values that an axis shows; around a flat curve a little, not uPlot's 0 to 100. */
function span(_: uPlot, min: number | null, max: number | null): uPlot.Range.MinMax {
  if (min === null || max === null) return [0, 1];
  if (min !== max) return uPlot.rangeNum(min, max, 0.1, true);
  const room = Math.abs(min) / 2 || 1;
  return [min - room, max + room];
}

function options(curves: Curve[], log: boolean, width: number, style: CSSStyleDeclaration): uPlot.Options {
  const series: uPlot.Series[] = [{ label: "batch", value: (_, step) => number(step) }];
  const bands: uPlot.Band[] = [];
  curves.forEach((curve, index) => {
    const color = COLORS[index % COLORS.length]!;
    const shared = { spanGaps: true, value: (_: uPlot, value: number | null) => number(value) };
    const points = { show: curve.series.points.length < FEW_POINTS && !banded(curve.series), size: 5, fill: color };
    series.push({ ...shared, label: curve.label, stroke: color, width: 1.6, points });
    if (banded(curve.series)) {
      const listed = curves.length === 1 ? "side" : "unlisted";
      const side = { ...shared, width: 0, points: { show: false }, class: listed };
      series.push({ ...side, label: "max" }, { ...side, label: "min" });
      bands.push({ series: [series.length - 2, series.length - 1], fill: `${color}38` });
    }
  });
  const line = style.getPropertyValue("--line");
  const axis: uPlot.Axis = {
    stroke: style.getPropertyValue("--muted"),
    grid: { stroke: line, width: 1 },
    ticks: { stroke: line, width: 1, size: 4 },
    font: "11px system-ui, sans-serif",
    values: (_, ticks) => ticks.map(tick),
  };
  return {
    width,
    height: HEIGHT,
    padding: [8, 22, 0, 0],
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: span } },
    axes: [{ ...axis, size: 30 }, { ...axis, size: 58 }],
    cursor: { sync: { key: "batch" }, points: { size: 6 } },
    legend: { live: true },
    series,
    bands,
  };
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

/** Draw new data; an area that the user has zoomed to stays. */
function redraw(plot: uPlot, curves: Curve[]): void {
  const steps = plot.data[0];
  const { min, max } = plot.scales.x!;
  const whole = steps.length === 0 || min == null || (min <= steps[0]! && max! >= steps[steps.length - 1]!);
  plot.setData(table(curves), whole);
  if (!whole) plot.redraw();
}

export function Chart({ title, curves, log }: { title: string; curves: Curve[]; log: boolean }) {
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const dark = useDark();
  const logarithmic = log && positive(curves);
  const shapes = curves.map((c) => `${c.label} ${banded(c.series)} ${c.series.points.length < FEW_POINTS}`);
  const shape = [...shapes, logarithmic, dark].join("|");

  useEffect(() => {
    const element = host.current!;
    const width = () => Math.max(220, element.clientWidth);
    const made = new uPlot(options(curves, logarithmic, width(), getComputedStyle(element)), table(curves), element);
    plot.current = made;
    const watcher = new ResizeObserver(() => made.setSize({ width: width(), height: HEIGHT }));
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    if (plot.current) redraw(plot.current, curves);
  }, [curves]);

  const only = curves.length === 1 ? curves[0]!.series.points : [];
  const missing = lost(curves);
  return (
    <figure class="chart" aria-label={words(title, curves)}>
      <figcaption title="Drag in the chart to zoom, click twice to see all">
        {title} {missing > 0 && <small class="warn">{number(missing)} not finite</small>}
        {only.length > 0 && <output>{number(only[only.length - 1]![1])}</output>}
      </figcaption>
      <div ref={host} />
    </figure>
  );
}
