/** Which trials are drawn, what is read of them, and which charts come of it. */

import { useRef } from "preact/hooks";

import { get } from "../api";
import { type Along, isMetric, isTime, positioned, titleOf } from "./along";
import { type Curve, refine, type Zoom } from "./curve";
import type { Look } from "./looks";
import { type Seen, shortNames } from "../columns";
import { ENDED } from "../parts";
import { written } from "../plot/axis";
import type { Curve as Series, Experiment, Metrics } from "../resources";
import { ranked } from "../sorting";

/** Trials that are drawn where none was chosen: the best. */
export const USUAL_TRIALS = 10;
/** Trials that are drawn at most. */
export const MOST_TRIALS = 50;

const MOST_POINTS = 400; // of a curve: about one a pixel
const LEAST_POINTS = 100;
const ALL_POINTS = 5000; // of all curves of a chart: more cannot be distinguished, and are slow
const GROUPS = ["training", "validation", "system"];
const COUNTERS = ["batches", "epochs", "loss_scale", "skipped_steps"];

/** A trial whose curves are drawn. */
export interface Line {
  trial: Seen;
  /** Who it is: `trial 7`. */
  name: string;
  /** What it was started with, in a few words. */
  detail: string;
  look: Look;
  best: boolean;
  /** Where its name in the legend leads. */
  href: string;
}

export interface Read {
  trial: number;
  series: Series[];
  /** Titles of the charts of all metrics that were read. */
  titles: string[];
}

/** All trials that were chosen, as far as there is room, else the best ones; in the order of ids. */
export function drawn(row: Experiment, trials: Seen[], chosen: Seen[]): Seen[] {
  const [from, most] = chosen.length > 0 ? [chosen, MOST_TRIALS] : [trials, USUAL_TRIALS];
  return ranked(from, row.smaller_is_better).slice(0, most).sort((a, b) => a.id - b.id);
}

/** What a trial was started with, where that differs between trials. */
export function difference(trial: Seen, names: string[]): string {
  const short = shortNames(names, 0);
  return names
    .filter((name) => name in trial.hparams)
    .map((name) => `${short.get(name)} ${written(trial.hparams[name]!)}`)
    .join(", ");
}

/** Where a metric stands: the searchers' first, then losses, accuracies, others, counters. */
function place(name: string, metrics: string[]): number {
  if (name === "loss") return 0;
  if (metrics.includes(name)) return 1;
  if (name.endsWith("loss")) return 2;
  if (name.includes("accuracy")) return 3;
  return COUNTERS.includes(name) ? 5 : 4;
}

export type Titled = [string, Curve[]];

/** A chart for each metric, the most wanted first. */
export function charts(reads: Read[], metrics: string[], named: (trial: number, metric: string) => Pick<Curve, "label" | "look">): Titled[] {
  const found = new Map<string, Curve[]>();
  for (const { trial, series } of reads) {
    for (const one of series) {
      const key = titleOf(one);
      const curve = { trial, ...named(trial, one.name), series: one };
      found.set(key, [...(found.get(key) ?? []), curve]);
    }
  }
  const order = ([, curves]: Titled) => {
    const { group, name } = curves[0]!.series;
    return [place(name, metrics), GROUPS.indexOf(group), name] as const;
  };
  return [...found].sort((a, b) => {
    const [x, y] = [order(a), order(b)];
    return x[0] - y[0] || x[1] - y[1] || x[2].localeCompare(y[2]);
  });
}

/** Whether a metric only counts along: the number of epochs, or skipped steps where there are none. */
export function counter([, curves]: Titled): boolean {
  const { name } = curves[0]!.series;
  const happened = curves.some(({ series }) => series.points.some((point) => point[1] !== 0));
  return COUNTERS.includes(name) && !(name === "skipped_steps" && happened);
}

/** Reads the curves of a trial, a part of them in detail; what cannot change is read once. */
export function useReader(trials: number, along: Along): (trial: Seen, groups: string[], zoom: Zoom | null) => Promise<Read> {
  const most = Math.round(Math.min(MOST_POINTS, Math.max(LEAST_POINTS, ALL_POINTS / trials)));
  const kept = useRef(new Map<string, Series[]>());
  const read = async (trial: Seen, group: string, part: string) => {
    const key = `${trial.id} ${group} ${isTime(along)} ${most} ${part} ${trial.state} ${trial.steps_completed} ${trial.restarts}`;
    const known = kept.current.get(key);
    if (known) return known;
    const path = `/trials/${trial.id}/metrics?group=${group}&max_points=${most}${part}${isTime(along) ? "&times=true" : ""}`;
    const series = (await get<Metrics>(path)).metrics;
    if (ENDED.includes(trial.state)) kept.current.set(key, series);
    return series;
  };
  return async (trial, groups, zoom) => {
    const axis = isMetric(along) ? [along.split(": ")[0]!] : [];
    const series = await Promise.all(
      [...new Set([...groups, ...axis])].map(async (group) => {
        const whole = await read(trial, group, "");
        if (zoom === null || !whole.some((one) => one.band)) return whole;
        return refine(whole, await read(trial, group, `&first=${zoom[0]}&last=${zoom[1]}`), zoom);
      }),
    );
    const all = series.flat();
    const drawn = positioned(all, along).filter((one) => groups.includes(one.group));
    return { trial: trial.id, series: drawn, titles: all.map(titleOf) };
  };
}
