"""Who moves the bytes: one module an engine, and one that chooses.

All follow the rules of `tierstore_backends.files.engines.base`, and all ask
`tierstore_backends.files.engines.batch_io` what to ask of the kernel; they differ in who asks, and in what is
done meanwhile.
"""
