// kubectl is Kubernetes' kubectl, for the tests that run the commands in the documents. Kubernetes' own main package is
// in a module that can't be required together with helm.
package main

import (
	"k8s.io/kubectl/pkg/cmd"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
)

func main() {
	cmdutil.CheckErr(cmd.NewDefaultKubectlCommand().Execute())
}
