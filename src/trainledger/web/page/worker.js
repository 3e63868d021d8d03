// Python in the browser: loads Pyodide and the calculators from beside this file, and answers one message after another.

const AGAIN = 100; // milliseconds between two reports of how far an answer is

async function start() {
  postMessage({ starting: "Python is loading, about 12 MB once." });
  const bytes = async (path) => {
    const reply = await fetch(path);
    if (!reply.ok) throw new Error(`${path} cannot be loaded (status ${reply.status})`);
    return new Uint8Array(await reply.arrayBuffer());
  };
  const [sources, config, { loadPyodide }] = await Promise.all([
    bytes("python.zip"),
    fetch("config.json").then((reply) => reply.json()),
    import("./pyodide/pyodide.mjs"),
  ]);
  const python = await loadPyodide({ indexURL: new URL("pyodide/", import.meta.url).href });
  postMessage({ starting: "Python is starting." });
  const wheels = config.wheels.map((name) => new URL(`pyodide/${name}`, import.meta.url).href);
  if (wheels.length) await python.loadPackage(wheels);
  python.unpackArchive(sources, "zip", { extractDir: "/calculators" });
  python.runPython("import sys; sys.path.insert(0, '/calculators')");
  return python.pyimport("trainledger.web.message").replied;
}

function reporter(id) {
  let last = 0;
  return (what, done, of) => {
    if (performance.now() - last < AGAIN) return;
    last = performance.now();
    postMessage({ id, working: { what, done, of } });
  };
}

const replied = await start().catch((error) => postMessage({ failed: error.message }));

onmessage = ({ data }) => {
  try {
    postMessage({ id: data.id, ...JSON.parse(replied(JSON.stringify(data), reporter(data.id))) });
  } catch (error) {
    console.error(error);
    postMessage({ id: data.id, error: [{ field: "", sentence: "The question met an error of trainledger; the console says more." }] });
  }
};
if (replied) postMessage({ ready: true });
