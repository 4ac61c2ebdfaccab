/** Doing the same with several experiments or trials, after a question. */

import { useEffect, useRef, useState } from "preact/hooks";

import { Allowed } from "./views/users/access";
import { post, remove } from "./api";
import { Dialog, dismiss } from "./dialog";
import { number } from "./format";

export interface Deed {
  name: string;
  /** What happens, asked before it is done. */
  ask: string;
  /** Whether it cannot be undone. */
  final?: boolean;
}

interface BulkProps {
  /** Experiments or trials. */
  noun: "experiment" | "trial";
  ids: number[];
  deeds: Deed[];
  /** Those that a deed is meant for; the others are passed over. */
  fits: (deed: string, id: number) => boolean;
  done: () => void;
}

/** Buttons of the actions on selected rows. */
export function Bulk({ noun, ids, deeds, fits, done }: BulkProps) {
  const [asked, setAsked] = useState<Deed | null>(null);
  if (ids.length === 0) return null;
  return (
    <span class="bulk" role="group" aria-label={`actions for ${ids.length} ${noun}s`}>
      <span class="muted">{number(ids.length)} selected:</span>
      <Allowed>
        {deeds.map((deed) => {
          const count = ids.filter((id) => fits(deed.name, id)).length;
          return (
            <button type="button" key={deed.name} disabled={count === 0} onClick={() => setAsked(deed)}>
              {deed.name}
            </button>
          );
        })}
      </Allowed>
      {asked && (
        <Several
          noun={noun}
          deed={asked}
          ids={ids.filter((id) => fits(asked.name, id))}
          passed={ids.filter((id) => !fits(asked.name, id)).length}
          close={() => setAsked(null)}
          done={done}
        />
      )}
    </span>
  );
}

interface SeveralProps {
  noun: string;
  deed: Deed;
  ids: number[];
  passed: number;
  close: () => void;
  done: () => void;
}

const NAMED = 12;

function Several({ noun, deed, ids, passed, close, done }: SeveralProps) {
  const [count, setCount] = useState<number | null>(null);
  const [problems, setProblems] = useState<string[]>([]);
  const stopped = useRef(false);
  useEffect(
    () => () => {
      stopped.current = true;
    },
    [],
  );
  const start = async () => {
    const failed: string[] = [];
    for (const [at, id] of ids.entries()) {
      if (stopped.current) break;
      setCount(at);
      const path = `/${noun}s/${id}`;
      await (deed.name === "delete" ? remove(path) : post(`${path}/${deed.name}`)).catch((problem: Error) => {
        failed.push(`${noun} ${id}: ${problem.message}`);
      });
    }
    setCount(ids.length);
    setProblems(failed);
    done();
    if (failed.length === 0) close();
  };
  const several = ids.length === 1 ? noun : `${noun}s`;
  const named = ids.slice(0, NAMED).join(", ") + (ids.length > NAMED ? ` and ${number(ids.length - NAMED)} more` : "");
  const ended = count === ids.length;
  return (
    <Dialog title={`${deed.name} ${number(ids.length)} ${several}?`} close={close}>
      <p>{deed.ask}</p>
      <p class="muted">
        {several} {named}
        {passed > 0 && `; not applicable to ${number(passed)}`}
      </p>
      {count !== null && !ended && <progress max={ids.length} value={count} aria-label="done" />}
      {problems.length > 0 && (
        <div role="alert" class="notice bad">
          <b>
            {number(problems.length)} of {number(ids.length)} failed
          </b>
          <pre tabIndex={0}>{problems.slice(0, 100).join("\n")}</pre>
        </div>
      )}
      <p class="actions">
        {!ended && (
          <button type="button" class={deed.final ? "final" : ""} disabled={count !== null} onClick={() => void start()}>
            {deed.name}
          </button>
        )}
        <button type="button" onClick={close}>
          {ended ? "Close" : count === null ? dismiss(deed.name) : "Stop"}
        </button>
      </p>
    </Dialog>
  );
}
