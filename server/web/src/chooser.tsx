/** Which columns of a table are shown: chosen by the reader, and remembered by the browser. */

import { useState } from "preact/hooks";

import { useChoice } from "./route";

/** Columns that need no search. */
const FEW = 15;

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

export function Chooser({ columns, chosen }: ChooserProps) {
  const [open, setOpen] = useState(false);
  const [find, setFind] = useState("");
  const found = columns.filter(([, label]) => label.toLowerCase().includes(find.toLowerCase()));
  return (
    <details class="chooser" onToggle={(e) => setOpen(e.currentTarget.open)}>
      <summary>columns</summary>
      {open && (
        <div class="choice" role="group" aria-label="columns">
          {columns.length > FEW && (
            <input type="search" placeholder="Column name" aria-label="search columns" value={find} onInput={(e) => setFind(e.currentTarget.value)} />
          )}
          {found.map(([column, label]) => (
            <label key={column}>
              <input type="checkbox" aria-label={`column ${label}`} checked={chosen.shown(column)} onChange={(e) => chosen.set(column, e.currentTarget.checked)} /> {label}
            </label>
          ))}
          <button type="button" onClick={chosen.reset}>
            Reset
          </button>
        </div>
      )}
    </details>
  );
}
