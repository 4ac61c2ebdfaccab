/** Columns that tell a metric: of each trial of an experiment, or of the best trial of each. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { get } from "./api";
import { useLoaded } from "./live";
import type { MetricName, Num, TrialColumns } from "./resources";

/** Interval between two reads of metrics of running trials. */
const CALM_MS = 3000;

/** The name of a metric's column begins like this. */
export const METRIC = /^(?:last|min|max)\./;

export interface MetricColumn {
  /** In the server's words. */
  key: string;
  name: string;
  falling: boolean;
}

export function metricColumns(metrics: MetricName[]): MetricColumn[] {
  const kinds = ["last", "min", "max"];
  return metrics.flatMap(({ group, name }) => kinds.map((what) => ({ key: `${what}.${group}.${name}`, name: `${what} ${group}: ${name}`, falling: what === "max" })));
}

/** Metrics by row and column, which the rows themselves do not tell; the path says of which rows. */
export function useMeasured(path: string, names: string[], tick: number): { at: (id: number) => Record<string, Num>; error: string | null } {
  const calm = useCalm(tick);
  const query = ["id", ...names].map((name) => `column=${encodeURIComponent(name)}`).join("&");
  const load = async () => (names.length === 0 ? null : (await get<TrialColumns>(`${path}?${query}`)).columns);
  const { value, error } = useLoaded(`measured ${path} ${query}`, load, calm);
  const places = useMemo(() => new Map((value?.id ?? []).map((id, place) => [id as number, place])), [value]);
  const at = (id: number) => {
    const place = places.get(id);
    if (place === undefined || value === null) return {};
    return Object.fromEntries(names.map((name) => [name, (value[name]?.[place] ?? null) as Num]));
  };
  return { at, error };
}

/** Follows `tick`, but only every few seconds. */
export function useCalm(tick: number): number {
  const [calm, setCalm] = useState(tick);
  const latest = useRef(tick);
  latest.current = tick;
  useEffect(() => {
    if (tick === calm) return;
    const timer = window.setTimeout(() => setCalm(latest.current), CALM_MS);
    return () => window.clearTimeout(timer);
  }, [tick === calm, calm]);
  return calm;
}
