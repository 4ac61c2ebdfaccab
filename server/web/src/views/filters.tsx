/** Conditions on trials, shared by all views of an experiment: they stand in the address. */

import { useState } from "preact/hooks";

import { type Condition, conditions, PREFIX, titled, type Value } from "../columns";
import { written } from "../plot/axis";
import { Problem } from "../parts";
import { useChoice } from "../route";

const SIGNS = ["=", "!=", "<", "<=", ">", ">=", "contains"];
const FIELDS = ["state", "best_validation", "latest_validation", "steps_completed", "restarts", "slot_seconds", "id"];

/** The conditions of the address, and how to change them. */
export function useConditions(): [Condition[], (next: Condition[]) => void, boolean] {
  const [text, setText] = useChoice("where");
  const found = conditions(text);
  return [found ?? [], (next) => setText(next.length === 0 ? "" : JSON.stringify(next)), found === null];
}

const formatted = (value: unknown): string => (Array.isArray(value) ? value.map((each) => written(each as Value)).join(", ") : written(value as Value));

/** What a text says, as a value: a number where it is one. */
function value(text: string, column: string): Value {
  const trimmed = text.trim();
  if (["none", "null", "–"].includes(trimmed)) return null;
  if (column === "state") return trimmed.toUpperCase();
  if (trimmed !== "" && Number.isFinite(Number(trimmed))) return Number(trimmed);
  return trimmed === "true" ? true : trimmed === "false" ? false : trimmed;
}

interface FiltersProps {
  /** Hyperparameters. */
  names: string[];
  /** Columns of metrics. */
  metrics?: string[];
  /** The searcher's. */
  metric: string;
  count: string;
}

export function Filters({ names, metrics = [], metric, count }: FiltersProps) {
  const [where, setWhere, broken] = useConditions();
  const [open, setOpen] = useState(false);
  return (
    <div class="choice filters">
      {broken && <Problem text="The filters in the address are invalid; none is applied." />}
      {where.map((one, at) => (
        <button type="button" class="reset" key={JSON.stringify(one)} aria-label={`remove ${titled(one[0], metric)} ${one[1]} ${formatted(one[2])}`} onClick={() => setWhere(where.filter((_, i) => i !== at))}>
          {titled(one[0], metric)} {one[1]} {formatted(one[2])} ✕
        </button>
      ))}
      {open ? (
        <Editor columns={[...names.map((name) => PREFIX + name), ...FIELDS, ...metrics]} metric={metric} add={(one) => (setWhere([...where, one]), setOpen(false))} />
      ) : (
        <button type="button" onClick={() => setOpen(true)}>
          filter
        </button>
      )}
      {where.length > 1 && (
        <button type="button" onClick={() => setWhere([])}>
          Clear filters
        </button>
      )}
      <span class="muted" role="status">
        {count}
      </span>
    </div>
  );
}

function Editor({ columns, metric, add }: { columns: string[]; metric: string; add: (one: Condition) => void }) {
  const [column, setColumn] = useState(columns[0]!);
  const [sign, setSign] = useState("=");
  const [text, setText] = useState("");
  const submit = (event: Event) => {
    event.preventDefault();
    add([column, sign, sign === "contains" ? text : value(text, column)]);
  };
  return (
    <form onSubmit={submit} class="choice">
      <select aria-label="filter by" value={column} onChange={(e) => setColumn(e.currentTarget.value)}>
        {columns.map((each) => (
          <option value={each} key={each}>
            {titled(each, metric)}
          </option>
        ))}
      </select>
      <select aria-label="comparison" value={sign} onChange={(e) => setSign(e.currentTarget.value)}>
        {SIGNS.map((each) => (
          <option key={each}>{each}</option>
        ))}
      </select>
      <input type="search" aria-label="value" placeholder="value" value={text} onInput={(e) => setText(e.currentTarget.value)} />
      <button type="submit">add</button>
    </form>
  );
}
