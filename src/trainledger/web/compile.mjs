// node compile.mjs PYODIDE.MJS FROM.ZIP TO.ZIP: an archive of Python sources as bytecode of the Python in Pyodide.
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [pyodide, from, to] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(pyodide).href);
const python = await loadPyodide();
python.unpackArchive(new Uint8Array(readFileSync(from)), "zip", { extractDir: "/sources" });
python.runPython(`
import compileall, pathlib, py_compile, zipfile

root = pathlib.Path("/sources")
unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
assert compileall.compile_dir(root, quiet=1, legacy=True, stripdir="/sources", invalidation_mode=unchecked)
with zipfile.ZipFile("/compiled.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
    for each in sorted(root.rglob("*")):
        if each.is_file() and each.suffix != ".py":
            entry = zipfile.ZipInfo(str(each.relative_to(root)))  # without a time
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, each.read_bytes())
`);
writeFileSync(to, python.FS.readFile("/compiled.zip"));
