/** One metric of one or several trials as curves, with the min/max band where points were merged. */

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { finite, type Series } from "./api";
import { number } from "./format";

export interface Curve {
  label: string;
  series: Series;
}

const COLORS = ["#2f6fed", "#d9480f", "#2b8a3e", "#9c36b5", "#c2255c", "#0b7285", "#8a6d00", "#5f3dc4"];

/** Merge curves onto one axis of steps; a hole is `undefined` so that lines go on across it. */
function table(curves: Curve[]): uPlot.AlignedData {
  const rows = curves.flatMap(({ series }) => {
    const band = series.band?.length ? series.band : null;
    const mean = band
      ? [band.map((b) => b[0]), band.map((b) => finite(b[3]))]
      : [series.points.map((p) => p[0]), series.points.map((p) => finite(p[1]))];
    const sides = band
      ? [
          [band.map((b) => b[0]), band.map((b) => finite(b[2]))],
          [band.map((b) => b[0]), band.map((b) => finite(b[1]))],
        ]
      : [];
    return [mean, ...sides] as uPlot.AlignedData[];
  });
  return rows.length === 0 ? [[]] : uPlot.join(rows);
}

export function Chart({ title, curves }: { title: string; curves: Curve[] }) {
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const shape = curves.map((c) => `${c.label}${c.series.band?.length ? "~" : ""}`).join("|");

  useEffect(() => {
    const element = host.current;
    if (element === null) return;
    const style = getComputedStyle(element);
    const axis = { stroke: style.getPropertyValue("--muted"), grid: { stroke: style.getPropertyValue("--line"), width: 1 } };
    const series: uPlot.Series[] = [{ label: "batch" }];
    const bands: uPlot.Band[] = [];
    curves.forEach((curve, index) => {
      const color = COLORS[index % COLORS.length]!;
      const value = (_: uPlot, v: number | null) => (v === null || v === undefined ? "–" : number(v));
      const few = curve.series.points.length < 60 && !curve.series.band?.length;
      series.push({ label: curve.label, stroke: color, width: 1.6, value, spanGaps: true, points: { show: few, size: 4 } });
      if (curve.series.band?.length) {
        const side = { stroke: "transparent", spanGaps: true, points: { show: false } };
        series.push({ ...side, label: `${curve.label} max`, value }, { ...side, label: `${curve.label} min`, value });
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${color}33` });
      }
    });
    const made = new uPlot(
      {
        width: Math.max(220, element.clientWidth),
        height: 220,
        scales: { x: { time: false } },
        axes: [axis, { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => number(tick)) }],
        legend: { live: true },
        series,
        bands,
      },
      table(curves),
      element,
    );
    plot.current = made;
    const watcher = new ResizeObserver(() => made.setSize({ width: Math.max(220, element.clientWidth), height: 220 }));
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => plot.current?.setData(table(curves)), [curves]);

  return (
    <figure class="chart" aria-label={`${title} over batches`}>
      <figcaption>{title}</figcaption>
      <div ref={host} />
    </figure>
  );
}
