/** Every trial of an experiment in short: what it was started with, and how it did. */

import { finite } from "./api";
import type { Experiment, Num, Trial, TrialColumns } from "./resources";

export type Value = number | string | boolean | null;

export interface Seen {
  id: number;
  state: string;
  best_validation: Num | null;
  latest_validation: Num | null;
  best_steps: number | null;
  steps_completed: number;
  progress: number;
  restarts: number;
  slot_seconds: number;
  activity: string | null;
  archived: number | boolean;
  /** Leaves by their dotted names. */
  hparams: Record<string, Value>;
}

export const PREFIX = "hparams.";
export const METRICS = ["best_validation", "latest_validation", "slot_seconds", "steps_completed", "restarts"];

/** The metric that compares trials; a single trial may name none. */
export const metricOf = (row: Experiment): string => row.metric ?? "validation";

/** Columns to rows. */
export function seen({ columns }: TrialColumns): Seen[] {
  const plain = Object.entries(columns).filter(([name]) => !name.startsWith(PREFIX));
  const leaves = Object.entries(columns).filter(([name]) => name.startsWith(PREFIX));
  return (columns.id ?? []).map((_, at) => {
    const row = Object.fromEntries(plain.map(([name, cells]) => [name, cells[at]]));
    const there = leaves.filter(([, cells]) => cells[at] !== null);
    const hparams = Object.fromEntries(there.map(([name, cells]) => [name.slice(PREFIX.length), cells[at] as Value]));
    return { ...row, hparams } as unknown as Seen;
  });
}

/** What an event tells of a trial. */
export function seenTrial(trial: Trial): Seen {
  return { ...trial, hparams: leavesOf(trial.hparams) };
}

/** The leaves of a tree of values, by their dotted names. */
export function leavesOf(tree: unknown): Record<string, Value> {
  const found: Record<string, Value> = {};
  collect(found, "", tree);
  return found;
}

/** As the server takes hyperparameters apart: lists of plain values are one leaf. */
function collect(found: Record<string, Value>, path: string, tree: unknown): void {
  const nested = (each: unknown) => each !== null && typeof each === "object";
  const parts = Array.isArray(tree) ? (tree.some(nested) ? Object.entries(tree) : []) : nested(tree) ? Object.entries(tree as object) : [];
  for (const [key, value] of parts) collect(found, path ? `${path}.${key}` : key, value);
  if (path && parts.length === 0 && tree !== null) found[path] = nested(tree) ? JSON.stringify(tree) : (tree as Value);
}

/** Value of a column; a measure that is not finite is none. */
export function cell(row: Seen, column: string): Value {
  if (column.startsWith(PREFIX)) return row.hparams[column.slice(PREFIX.length)] ?? null;
  const value = row[column as keyof Seen] as Value;
  return column.endsWith("_validation") ? finite(value as Num | null) : (value ?? null);
}

/** Names of the hyperparameters that differ between trials. */
export function varying(rows: Seen[]): string[] {
  const first = new Map<string, Value>();
  const differ = new Set<string>();
  const names = new Set<string>();
  for (const row of rows) for (const name in row.hparams) names.add(name);
  for (const row of rows) {
    for (const name of names) {
      const value = row.hparams[name] ?? null;
      if (!first.has(name)) first.set(name, value);
      else if (first.get(name) !== value) differ.add(name);
    }
  }
  return [...names].filter((name) => differ.has(name));
}

/** Characters that a name may have and stay whole. */
const SHORT = 20;

/** What hyperparameters are called where there is little room: `short_names` of zerolab.contract.flatten. */
export function shortNames(names: string[], room = SHORT): Map<string, string> {
  const known = new Set(names);
  const count = new Map<string, number>();
  for (const name of known) for (const tail of tails(name)) count.set(tail, (count.get(tail) ?? 0) + 1);
  const short = (name: string) => (name.length <= room ? name : tails(name).find((tail) => count.get(tail) === 1) ?? name);
  return new Map([...known].map((name) => [name, short(name)]));
}

/** The last part of a dotted name, the last two, ...: those that begin with a word. */
function tails(name: string): string[] {
  const parts = name.split(".");
  const from = parts.map((_, at) => parts.length - 1 - at).filter((at) => parts[at] !== "" && !/^\d+$/.test(parts[at]!));
  return from.map((at) => parts.slice(at).join("."));
}

/** Names of all hyperparameters of some trials, in short. */
export function heads(rows: Seen[]): Map<string, string> {
  return shortNames(rows.flatMap((row) => Object.keys(row.hparams)));
}

const KINDS = ["int", "double", "log", "categorical"];

/** The hyperparameters of an experiment file by their dotted names: constants, and the kind of each space. */
export function constants(tree: unknown): Record<string, Value> {
  const known = (node: unknown): unknown => {
    if (node === null || typeof node !== "object") return node;
    const { type, val } = node as { type?: unknown; val?: unknown };
    if (type === "const") return val;
    if (typeof type === "string" && KINDS.includes(type)) return `(${type})`;
    if (Array.isArray(node)) return node.map(known);
    return Object.fromEntries(Object.entries(node).map(([key, each]) => [key, known(each)]));
  };
  return leavesOf(known(tree));
}

/** The kind of space that the configuration gives a hyperparameter: `log`, `double`, ...; null for none. */
export function spaceOf(config: Record<string, unknown>, name: string): string | null {
  let node: unknown = config.hyperparameters;
  for (const part of name.split(".")) node = (node as Record<string, unknown> | null | undefined)?.[part];
  const kind = (node as { type?: unknown } | null | undefined)?.type;
  return typeof kind === "string" ? kind : null;
}

/** A column in words. */
export function titled(column: string, metric: string): string {
  if (column.startsWith(PREFIX)) return column.slice(PREFIX.length);
  const words: Record<string, string> = {
    best_validation: `best ${metric}`,
    latest_validation: `latest ${metric}`,
    slot_seconds: "slot time",
    steps_completed: "batches",
  };
  return words[column] ?? column;
}

/** Column, operator and value: as the server takes them. */
export type Condition = [string, string, unknown];

/** Conditions of the address; null where it holds none that can be read. */
export function conditions(text: string): Condition[] | null {
  if (text === "") return [];
  try {
    const found: unknown = JSON.parse(text);
    const good = (each: unknown) => Array.isArray(each) && each.length === 3 && typeof each[0] === "string" && typeof each[1] === "string";
    return Array.isArray(found) && found.every(good) ? (found as Condition[]) : null;
  } catch {
    return null;
  }
}
