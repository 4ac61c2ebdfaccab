/** Which columns of a table are shown: chosen by the reader, and remembered by the browser. */

import { useState } from "preact/hooks";

import { PREFIX } from "./columns";
import { Popover } from "./popover";
import { useChoice } from "./route";

/** What differs from the usual, by columns: shown or not. */
type Wishes = Record<string, boolean>;

function read(place: string): Wishes {
  try {
    return parsed(window.localStorage.getItem(place) ?? "{}");
  } catch {
    return {}; // kept from us
  }
}

function parsed(text: string): Wishes {
  try {
    const found: unknown = JSON.parse(text);
    return found !== null && typeof found === "object" ? (found as Wishes) : {};
  } catch {
    return {}; // written by something else
  }
}

function write(place: string, wishes: Wishes): void {
  try {
    window.localStorage.setItem(place, JSON.stringify(wishes));
  } catch {
    // A browser that keeps nothing shows the usual columns next time.
  }
}

export interface Chosen {
  shown: (column: string) => boolean;
  set: (column: string, wanted: boolean) => void;
  reset: () => void;
  /** The choice as a text for addresses. */
  text: string;
}

/** The choice for a table; `usual` are the columns that are shown unless someone says otherwise. */
export function useColumns(table: string, usual: (column: string) => boolean): Chosen {
  const place = `zerolab columns of ${table}`;
  const [kept, keep] = useState(() => read(place));
  const [given, setGiven] = useChoice("columns"); // of a saved view or a link, which has precedence
  const wishes = given ? parsed(given) : kept;
  const change = (next: Wishes) => (given ? setGiven(JSON.stringify(next)) : (write(place, next), keep(next)));
  return {
    text: JSON.stringify(wishes),
    shown: (column) => wishes[column] ?? usual(column),
    set: (column, wanted) => {
      const { [column]: _, ...others } = wishes;
      change(wanted === usual(column) ? others : { ...others, [column]: wanted });
    },
    reset: () => change({}),
  };
}

interface ChooserProps {
  /** Each column, and what it is called. */
  columns: [string, string][];
  chosen: Chosen;
}

const GROUPS = ["General", "Hyperparameters", "Metrics", "System metrics"];

/** The group of a column. */
function groupOf([column, label]: [string, string]): string {
  if (column.startsWith(PREFIX)) return GROUPS[1]!;
  const kind = /^(?:last|min|max) (\w+): /.exec(label)?.[1];
  if (kind) return kind === "system" ? GROUPS[3]! : GROUPS[2]!;
  return /^(?:best|latest) (?!trial)/.test(label) ? GROUPS[2]! : GROUPS[0]!;
}

export function Chooser({ columns, chosen }: ChooserProps) {
  const [find, setFind] = useState("");
  const found = columns.filter(([, label]) => label.toLowerCase().includes(find.toLowerCase()));
  const groups = GROUPS.map((name) => ({ name, members: found.filter((column) => groupOf(column) === name) })).filter(({ members }) => members.length > 0);
  return (
    <Popover name="columns">
      <div class="choice">
        <input type="search" placeholder="Column name" aria-label="search columns" value={find} onInput={(e) => setFind(e.currentTarget.value)} />
        <button type="button" onClick={chosen.reset}>
          Reset
        </button>
      </div>
      {groups.length === 0 && <p class="muted">No matches.</p>}
      {groups.map(({ name, members }) => (
        <fieldset key={name}>
          <legend>{name}</legend>
          {members.map(([column, label]) => (
            <label key={column}>
              <input type="checkbox" aria-label={`column ${label}`} checked={chosen.shown(column)} onChange={(e) => chosen.set(column, e.currentTarget.checked)} /> {label}
            </label>
          ))}
        </fieldset>
      ))}
    </Popover>
  );
}
