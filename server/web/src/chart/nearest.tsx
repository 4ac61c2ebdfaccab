/** The values of the curves that are nearest to the mouse, beside it. */

import type uPlot from "uplot";

import { number } from "../format";
import type { Curve, Drawing } from "./curve";

/** Curves that are listed. */
const MOST = 5;

interface Found {
  curve: Curve;
  value: number;
  /** Distance from the upper edge of the chart, in pixels. */
  top: number;
}

/** The curves whose points at the cursor are nearest to it; the nearest first. */
export function nearest(plot: uPlot, curves: Curve[], { columns }: Drawing, count = MOST): Found[] {
  const at = plot.cursor.top ?? 0;
  const found = columns.flatMap((column, index): Found[] => {
    const value = plot.data[column]?.[plot.cursor.idxs?.[column] ?? -1];
    return value == null ? [] : [{ curve: curves[index]!, value, top: plot.valToPos(value, "y") }];
  });
  return found.sort((a, b) => Math.abs(a.top - at) - Math.abs(b.top - at)).slice(0, count);
}

interface NearestProps {
  plot: uPlot;
  curves: Curve[];
  drawing: Drawing;
  hot: number | null;
}

/** A list of values and curves, in the half of the chart without the mouse. */
export function Nearest({ plot, curves, drawing, hot }: NearestProps) {
  const found = nearest(plot, curves, drawing).sort((a, b) => a.top - b.top);
  if (found.length === 0) return null;
  const right = (plot.cursor.left ?? 0) < plot.over.clientWidth / 2;
  return (
    <ul class={right ? "nearest right" : "nearest"} aria-hidden="true">
      {found.map(({ curve, value }) => (
        <li key={`${curve.trial} ${curve.label}`} class={curve.trial === hot ? "hot" : ""}>
          <i class="swatch" style={{ background: curve.look.color }} /> <b>{number(value)}</b> {curve.label}
        </li>
      ))}
    </ul>
  );
}
