/** Questions and messages in the page: what will happen is said before it does. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

interface DialogProps {
  title: string;
  close: () => void;
  children: ComponentChildren;
}

/** A box over the page, until it is closed: by its buttons, or with Escape. */
export function Dialog({ title, close, children }: DialogProps) {
  const box = useRef<HTMLDialogElement>(null);
  useEffect(() => box.current?.showModal(), []);
  return (
    <dialog ref={box} onClose={close} aria-label={title}>
      <h2>{title}</h2>
      {children}
    </dialog>
  );
}

/** Label of the button that closes a dialog without an action; the action "cancel" has that name already. */
export const dismiss = (deed: string): string => (deed === "cancel" ? "Close" : "Cancel");

/** What went wrong, in a dialog. */
export function Failure({ text }: { text: string }) {
  return (
    <div role="alert" class="notice bad">
      <pre tabIndex={0}>{text}</pre>
    </div>
  );
}

interface QuestionProps {
  title: string;
  /** What happens, in words. */
  children?: ComponentChildren;
  /** Of the button that does it. */
  deed: string;
  /** Whether it cannot be undone. */
  final?: boolean;
  /** Performs the action; an error is shown, and the dialog stays open. */
  act: () => Promise<unknown>;
  close: () => void;
}

/** A form whose button does something; nothing happens without it. */
export function Question({ title, children, deed, final = false, act, close }: QuestionProps) {
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const submit = (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setProblem("");
    Promise.resolve()
      .then(act)
      .then(close, (failed: Error) => setProblem(failed.message))
      .finally(() => setBusy(false));
  };
  return (
    <Dialog title={title} close={close}>
      <form onSubmit={submit}>
        {children}
        {problem && <Failure text={problem} />}
        <p class="actions">
          <button type="submit" class={final ? "final" : ""} disabled={busy}>
            {deed}
          </button>
          <button type="button" onClick={close}>
            {dismiss(deed)}
          </button>
        </p>
      </form>
    </Dialog>
  );
}

interface Doing {
  children: string;
  busy?: boolean;
  act: () => Promise<unknown>;
}

/** A button that acts at once; errors are shown. */
export function Now({ children, busy = false, act }: Doing) {
  const [problem, setProblem] = useState("");
  return (
    <>
      <button type="button" disabled={busy} onClick={() => void act().catch((failed: Error) => setProblem(failed.message))}>
        {children}
      </button>
      {problem && (
        <Dialog title={`${children}: failed`} close={() => setProblem("")}>
          <Failure text={problem} />
          <p class="actions">
            <button type="button" onClick={() => setProblem("")}>
              Close
            </button>
          </p>
        </Dialog>
      )}
    </>
  );
}

interface Asking {
  /** On the button, and of the deed. */
  children: string;
  title: string;
  /** What happens, in words. */
  ask: ComponentChildren;
  final?: boolean;
  act: () => Promise<unknown>;
}

/** A button that asks before it does something. */
export function Ask({ children, title, ask, final, act }: Asking) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" onClick={() => setOpen(true)}>
        {children}
      </button>
      {open && (
        <Question title={title} deed={children} final={final} act={act} close={() => setOpen(false)}>
          <p>{ask}</p>
        </Question>
      )}
    </>
  );
}

interface Changing {
  children: string;
  title: string;
  ask: ComponentChildren;
  /** Changes that are offered, as JSON; the reader may edit them. */
  usual: string;
  act: (changes: unknown) => Promise<unknown>;
}

/** As {@link Ask}, with changes to a configuration. */
export function AskChanges({ children, title, ask, usual, act }: Changing) {
  const [open, setOpen] = useState(false);
  const [text, setText] = useState(usual);
  const start = () => act(read(text));
  return (
    <>
      <button type="button" onClick={() => (setText(usual), setOpen(true))}>
        {children}
      </button>
      {open && (
        <Question title={title} deed={children} act={async () => start()} close={() => setOpen(false)}>
          <p>{ask}</p>
          <textarea aria-label="changes" rows={5} spellcheck={false} value={text} onInput={(e) => setText(e.currentTarget.value)} />
          <p class="muted">
            JSON, merged into the configuration; <code>{"{}"}</code> changes nothing.
          </p>
        </Question>
      )}
    </>
  );
}

function read(text: string): unknown {
  try {
    const found: unknown = JSON.parse(text.trim() || "{}");
    if (found !== null && typeof found === "object" && !Array.isArray(found)) return found;
  } catch {
    // shown below
  }
  throw new Error(`changes: must be a JSON object, such as {"max_restarts": 3}, got ${text}`);
}
