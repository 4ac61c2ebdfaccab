/** Saved views: addresses of the page under a name. */

import { useContext, useState } from "preact/hooks";

import { get, patch, post, remove } from "../../api";
import { Ask, Now, Question } from "../../dialog";
import { useLoaded } from "../../live";
import { Problem } from "../../parts";
import { Popover } from "../../popover";
import type { View } from "../../resources";
import { Caller } from "../users/access";

/** The views that one may open, and a way to save what is shown; `columns` are not in the address yet. */
export function Views({ columns = null }: { columns?: string | null }) {
  const list = useLoaded("views", () => get<{ views: View[] }>("/views").then((answer) => answer.views));
  const caller = useContext(Caller);
  const [saving, setSaving] = useState(false);
  const changed = (change: Promise<unknown>) => change.then(list.reload);
  return (
    <>
      <Popover name="views">
        {list.error && <Problem text={list.error} />}
        {list.value?.length === 0 && <span class="muted">No saved views.</span>}
        {(list.value ?? []).map((view) => (
          <p key={view.id} class="actions">
            <a href={`#${view.path}`}>{view.name}</a> {view.shared && <small class="muted">shared by {view.owner}</small>}{" "}
            {(view.owner === caller?.user || caller?.role === "admin") && (
              <>
                <Rename view={view} done={list.reload} />
                <Now act={() => changed(patch(`/views/${view.id}`, { path: addressOfView(columns) }))}>replace</Now>
                <Ask act={() => changed(remove(`/views/${view.id}`))} final title={`delete view ${view.name}?`} ask="Experiments are not affected.">
                  delete
                </Ask>
              </>
            )}
          </p>
        ))}
        <button type="button" onClick={() => setSaving(true)}>
          save view
        </button>
      </Popover>
      {saving && <Save columns={columns} several={caller?.shared ?? false} done={list.reload} close={() => setSaving(false)} />}
    </>
  );
}

/** The address of what is shown, with the columns that this browser remembers. */
function addressOfView(columns: string | null): string {
  const [path = "/", query = ""] = (window.location.hash.slice(1) || "/").split("?", 2);
  const choices = new URLSearchParams(query);
  if (columns !== null) choices.set("columns", columns);
  const text = choices.toString();
  return path + (text && `?${text}`);
}

interface SaveProps {
  columns: string | null;
  /** Whether there are others who could see it. */
  several: boolean;
  done: () => void;
  close: () => void;
}

function Save({ columns, several, done, close }: SaveProps) {
  const [name, setName] = useState("");
  const [shared, setShared] = useState(false);
  const act = () => post("/views", { name, shared, path: addressOfView(columns) }).then(done);
  return (
    <Question title="save view" deed="save" act={act} close={close}>
      <label class="field">
        Name
        <input required maxLength={100} value={name} onInput={(e) => setName(e.currentTarget.value)} />
      </label>
      {several && (
        <label>
          <input type="checkbox" checked={shared} onChange={(e) => setShared(e.currentTarget.checked)} /> Show to all users
        </label>
      )}
    </Question>
  );
}

function Rename({ view, done }: { view: View; done: () => void }) {
  const [name, setName] = useState<string | null>(null);
  return (
    <>
      <button type="button" onClick={() => setName(view.name)}>
        rename
      </button>
      {name !== null && (
        <Question title={`rename view ${view.name}`} deed="rename" act={() => patch(`/views/${view.id}`, { name }).then(done)} close={() => setName(null)}>
          <label class="field">
            Name
            <input required maxLength={100} value={name} onInput={(e) => setName(e.currentTarget.value)} />
          </label>
        </Question>
      )}
    </>
  );
}
