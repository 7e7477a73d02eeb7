// Package nodeconfig is the configuration of a node's device plugin: the format of its file, which file applies to the node,
// and which of a change's values can take effect while pods run.
//
// A value comes from, in this order: a flag, the environment variable of that flag, the file, the default. The package uses
// no client and no clock, and only Source reads files.
//
// To add a key:
//
//  1. Add it to fileJSON, with an example in examples, and to Settings. Parse and check it in parse.
//  2. Give it its default in Defaults. If there is a flag, set it in the function that cmd passes as Source.Flags.
//  3. If a change isn't safe while pods run, decide in Settings.ApplicableNow what happens.
//  4. Add it to values.schema.json of the chart, and to docs/node.md.
package nodeconfig
