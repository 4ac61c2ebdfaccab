/** Lists in the order of a column, chosen by the heads of their tables. */

import { finite } from "./api";
import { PREFIX } from "./columns";
import type { Num, Trial } from "./resources";
import { useChoice } from "./route";

export interface Column<T> {
  name: string;
  value: (row: T) => number | string | null;
  /** The largest comes first when the head is clicked once. */
  falling?: boolean;
}

export interface Order {
  name: string;
  falling: boolean;
}

export const measured = (value: Num | null): number | null => finite(value); // what is not finite ranks last

/** Order by a column; what has no value comes last, either way. */
export function sorted<T extends { id: number }>(rows: T[], columns: Column<T>[], order: Order): T[] {
  const column = columns.find((one) => one.name === order.name);
  if (!column) return rows;
  const sign = order.falling ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (x === null || y === null) return Number(x === null) - Number(y === null) || a.id - b.id;
    return (x < y ? -sign : x > y ? sign : 0) || a.id - b.id;
  });
}

/** Trials, the best first; those without a validation come last, the newest of them first. */
export function ranked<T extends Pick<Trial, "id" | "best_validation">>(trials: T[], smallerIsBetter: boolean): T[] {
  const validation: Column<T> = { name: "best", value: (trial) => measured(trial.best_validation) };
  const newest = [...trials].sort((a, b) => b.id - a.id);
  const valued = newest.filter((trial) => validation.value(trial) !== null);
  const order = { name: "best", falling: !smallerIsBetter };
  return [...sorted(valued, [validation], order), ...newest.filter((trial) => validation.value(trial) === null)];
}

/** The order that the address tells under a name, and how a click on a head changes it. */
export function useOrder<T>(columns: Column<T>[], usual: Order, choice = "sort"): [Order, (name: string) => void] {
  const written = (order: Order) => `${order.falling ? "-" : ""}${order.name}`;
  const [text, setText] = useChoice(choice, written(usual));
  const order = { name: text.replace(/^-/, ""), falling: text.startsWith("-") };
  const click = (name: string) => {
    const first = columns.find((one) => one.name === name)?.falling ?? false;
    setText(written({ name, falling: order.name === name ? !order.falling : first }));
  };
  return [order, click];
}

export function Heads<T>({ columns, order, sort }: { columns: Column<T>[]; order: Order; sort: (name: string) => void }) {
  return (
    <>
      {columns.map(({ name }) => (
        <th key={name} class={name.startsWith(PREFIX) ? "verbatim" : undefined} aria-sort={order.name !== name ? "none" : order.falling ? "descending" : "ascending"}>
          <button type="button" onClick={() => sort(name)}>
            {name.startsWith(PREFIX) ? name.slice(PREFIX.length) : name}
          </button>
        </th>
      ))}
    </>
  );
}
