/** Options of uPlot for a chart. */

import uPlot from "uplot";

import { tick } from "../format";
import { banded, type Broken, type Curve, type Zoom } from "./curve";
import { type Along, across, formatPosition, isTime, zoomTo } from "./along";
import { linear, logarithmic, logTicks, type Range, withoutOutliers } from "./scales";

export interface Wishes {
  log: boolean;
  /** Columns whose outliers may lie beyond the edge; null when all is shown. */
  tight: number[] | null;
  /** The range of the axis of values that was asked for; null for what there is. */
  fixed: Range | null;
  /** What the other axis counts. */
  along: Along;
  height: number;
  width: number;
  /** Of the page: colours of the axes. */
  style: CSSStyleDeclaration;
  zoom: (zoom: Zoom | null) => void;
  moved: (plot: uPlot) => void;
  /** Whether no value can be drawn: the axis of values has no numbers then. */
  empty: boolean;
  /** Where curves are first not finite, from left to right. */
  marked: () => Broken[];
}

const PIXELS_A_TICK = 34;
const LEAST_DRAG = 6;
/** Curves whose bands may be strong: more would cover each other. */
const FEW = 3;

export function options(curves: Curve[], wishes: Wishes): uPlot.Options {
  const { height, width } = wishes;
  return {
    width,
    height,
    padding: [8, 26, 0, 0],
    ms: 1,
    scales: { x: { time: wishes.along === "clock", auto: false }, y: values(wishes) },
    axes: axes(wishes),
    focus: { alpha: 0.2 },
    cursor: {
      sync: { key: "batch", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      drag: { x: true, y: false, setScale: false },
      points: { size: 6 },
      bind: { dblclick: () => () => (wishes.zoom(null), null) },
    },
    legend: { show: false },
    hooks: { setSelect: [(plot) => selected(plot, wishes)], setCursor: [wishes.moved], draw: [(plot) => mark(plot, wishes)] },
    ...lines(curves),
  };
}

/** The axis of values. */
function values({ log, tight, fixed }: Wishes): uPlot.Scale {
  if (fixed) {
    const range = (_: uPlot, min: number | null): Range => (log && fixed[0] <= 0 ? [Math.min(min ?? fixed[1] / 10, fixed[1] / 10), fixed[1]] : fixed);
    return log ? { distr: 3, range } : { range };
  }
  const form = log ? logarithmic : linear;
  const range = (plot: uPlot, min: number | null, max: number | null) =>
    form(...(tight === null ? ([min, max] as const) : withoutOutliers(plot, tight)));
  return log ? { distr: 3, range } : { range };
}

/** A line for each curve, and the band around it. */
function lines(curves: Curve[]): { series: uPlot.Series[]; bands: uPlot.Band[] } {
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  for (const { label, look, series: drawn } of curves) {
    series.push({ label, stroke: look.color, dash: look.dash, width: 1.6, points: { size: 5, fill: look.color } });
    if (banded(drawn)) {
      const edge: uPlot.Series = { width: 0, points: { show: false } };
      series.push(edge, { ...edge });
      bands.push({ series: [series.length - 2, series.length - 1], fill: `${look.color}${curves.length > FEW ? "18" : "38"}` });
    }
  }
  return { series, bands };
}

/** A vertical line where each curve is first not finite; the first one has a label. */
function mark(plot: uPlot, { marked, along, style }: Wishes): void {
  const { ctx } = plot;
  const { left, top, width, height } = plot.bbox;
  const ratio = uPlot.pxRatio;
  ctx.save();
  ctx.lineWidth = ratio;
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "top";
  let labelled = false;
  for (const { at, color, stays } of marked()) {
    const x = Math.round(plot.valToPos(at, "x", true));
    if (x < left || x > left + width) continue;
    ctx.strokeStyle = color;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
    if (labelled) continue;
    labelled = true;
    const text = `${stays ? "not finite from" : "first not finite:"} ${formatPosition(at, along)}`;
    const right = x + ctx.measureText(text).width + 10 * ratio < left + width;
    ctx.textAlign = right ? "left" : "right";
    ctx.fillStyle = style.getPropertyValue("--wait");
    ctx.fillText(text, x + (right ? 5 : -5) * ratio, top + 4 * ratio);
  }
  ctx.restore();
}

function axes({ log, height, style, along, empty }: Wishes): uPlot.Axis[] {
  const line = style.getPropertyValue("--line");
  const axis: uPlot.Axis = {
    stroke: style.getPropertyValue("--muted"),
    grid: { stroke: line, width: 1 },
    ticks: { stroke: line, width: 1, size: 4 },
    font: "11px system-ui, sans-serif",
    values: (_, ticks) => ticks.map(tick),
  };
  const blank = empty && { values: () => [] };
  const round = (_: uPlot, __: number, min: number, max: number) => logTicks([min, max] as Range, height / PIXELS_A_TICK);
  const filter = (_: uPlot, ticks: number[]) => ticks;
  const time: uPlot.Axis = !isTime(along) ? axis : { ...axis, values: along === "clock" ? undefined : (_, ticks) => ticks.map(across) };
  return [{ ...time, size: along === "clock" ? 42 : 30 }, { ...axis, size: 58, ...(log && { splits: round, filter }), ...blank }];
}

/** A part was marked with the mouse. */
function selected(plot: uPlot, { zoom, along }: Wishes): void {
  const { left, width } = plot.select;
  if (width === 0) return;
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  if (width < LEAST_DRAG) return;
  zoom(zoomTo(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"), along));
}
